"""Strangers: files with somebody's own implementations, each read by a guest of its own.

An operator that a file defines for itself is read in the judge's process too, after the guest has
shown that the file can be read: its reference is the oracle, and nobody else can vouch for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.core import Implementation, Operator, WeftError, registry
from weft.workbench import cell_start
from weft.workbench.bring import Source, load
from weft.workbench.cell import CellDied, GuestError, Limits
from weft.workbench.hands import Guest, Hands, here
from weft.workbench.points import is_ours


class Strangers:
    """What some files declare, ready to be judged. A context: leaving it ends the guests.

    Raises :class:`WeftError` for a file that is not there, and for one that cannot be read, with
    what its guest said of it.
    """

    def __init__(self, files: Sequence[str], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.guests: dict[tuple[str, str], Guest] = {}
        self.operators: dict[str, Operator] = {}
        self.implementations: list[Implementation] = []
        self._baselines: dict[str, Implementation] = {}
        self._open = ExitStack()
        if files:
            cell_start.prepare()  # its imports go on beside ours
        try:
            for file in files:
                self._read(file)
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> Strangers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def _read(self, file: str) -> None:
        if not Path(file).is_file():
            raise WeftError("--with", expected="a .py or .cu file", got=file)
        source = Source(kind="file", path=str(Path(file).resolve()))
        try:
            guest = self._open.enter_context(Guest(source, self.limits))
        except (CellDied, GuestError) as error:
            said = error.reason if isinstance(error, CellDied) else str(error)
            raise Unreadable(f"{file} could not be read: {said}") from error
        if guest.operators:
            mine = load(source)
            self.operators |= {o.name: o for o in mine.operators}
            for one in mine.implementations:
                operator = self.operators.get(one.operator)
                if operator is not None and one.name == operator.tolerance.baseline:
                    self._baselines[one.operator] = one
        for one in guest.implementations:
            if (one.operator, one.name) in self.guests:
                raise WeftError(f"two files declare {one.operator} {one.name}", got=file)
            self.guests[one.operator, one.name] = guest
            self.implementations.append(one)

    def operator(self, name: str) -> Operator:
        """An operator by name: a file's own, or the registry's; raises :class:`WeftError`."""
        return self.operators[name] if name in self.operators else registry.operator(name)

    @property
    def operator_names(self) -> list[str]:
        """The operators that the files' implementations compute, in their order."""
        return list(dict.fromkeys(i.operator for i in self.implementations))

    def baseline(self, operator: str) -> Implementation | None:
        """What sets the tolerance of a file's own operator; None where the registry has it."""
        return self._baselines.get(operator)

    def guest(self, implementation: Implementation) -> Guest | None:
        """The guest that holds an implementation; None for one of Weft's own."""
        return self.guests.get((implementation.operator, implementation.name))

    def beside(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What a bench is asked for, with the files' implementations among Weft's own.

        Without names: the files' operators, and beside the files' implementations Weft's own but
        for the steps of ladders.
        """
        if not self.guests:
            return dict(asked)
        operators = [self.operator(n) for n in asked["operators"] or self.operator_names]
        theirs = {i.name for i in self.implementations}
        impls: list[str | Implementation] = [n for n in asked["impls"] or () if n not in theirs]
        if not asked["impls"]:
            ours = [i for o in operators if is_ours(o) for i in registry.implementations(o.name)]
            impls += dict.fromkeys(i.name for i in ours if not i.is_step)
        chosen = {o.name for o in operators}
        mine = [i for i in self.implementations if i.operator in chosen]
        if not mine:
            raise WeftError(
                "--with: nothing of this operator",
                expected=f"one of {', '.join(self.operator_names)}, which the files declare",
                got=", ".join(chosen),
            )
        impls += mine
        guests = {i.name: g for i in self.implementations if (g := self.guest(i))}
        more = {"guests": guests, "baselines": self._baselines}
        return {**asked, "operators": operators, "impls": impls, **more}

    def hands(self, implementation: Implementation) -> Hands:
        """Who makes an implementation's calls: its guest, or this process for Weft's own."""
        guest = self.guest(implementation)
        return guest.hands if guest else here


class Unreadable(Exception):
    """A stranger's file that could not be read: a verdict against it, and no wrong call."""
