"""What a call of ``weft inspect`` means: the operator, its implementations, and the case."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from weft.core import FORWARD, Case, Implementation, Operator, WeftError, registry
from weft.core.operator import unknown_name

COMPILES = ("triton", "cuda", "numba")
SWITCHES = {"triton": "TRITON_INTERPRET", "numba": "NUMBA_ENABLE_CUDASIM"}


def compile_here() -> None:
    """Have this process compile kernels, not interpret them: before triton or numba is imported.

    Raises :class:`WeftError` where it is too late for that.
    """
    for module, variable in SWITCHES.items():
        if module in sys.modules and os.environ.get(variable) == "1":
            raise WeftError(
                f"{module} was imported to interpret kernels, and cannot compile them now",
                hint=f"inspect in a process of its own, or with {variable}=0 from its start",
            )
        os.environ[variable] = "0"


class Ways:
    """The operators and implementations that a call may name: Weft's, and those of files.

    A file is run in this process: what it is asked for is its own kernels, and nothing is judged
    that it could falsify.
    """

    def __init__(self, files: Sequence[str] = ()) -> None:
        from weft.workbench.bring import Source, load

        for file in files:
            if not Path(file).is_file():
                raise WeftError("--with", expected="a .py or .cu file", got=file)
        found = [load(Source(kind="file", path=str(Path(f).resolve()))) for f in files]
        self.operators = {o.name: o for one in found for o in one.operators}
        self.brought = [i for one in found for i in one.implementations]

    def operator(self, name: str) -> Operator:
        """By its name; raises :class:`WeftError` with the near ones."""
        return self.operators[name] if name in self.operators else registry.operator(name)

    def of(self, operator: str) -> dict[str, Implementation]:
        """An operator's implementations by name, a file's last."""
        found = {}
        if operator not in self.operators:
            found = {i.name: i for i in registry.implementations(operator)}
        return found | {i.name: i for i in self.brought if i.operator == operator}

    def implementation(self, operator: str, name: str) -> Implementation:
        """By its name; raises :class:`WeftError` with the near ones."""
        found = self.of(operator)
        if name not in found:
            raise unknown_name(f"implementation of {operator}", name, list(found))
        return found[name]

    def compiling(self, operator: str) -> list[Implementation]:
        """Those with kernels that can be compiled with no GPU; a file's alone where it has some."""
        found = [i for i in self.of(operator).values() if has_kernels(i)]
        own = [i for i in found if i in self.brought]
        return own or found


def has_kernels(implementation: Implementation) -> bool:
    """Whether it has GPU kernels of its own, which some toolchain here compiles."""
    return implementation.backend in COMPILES and implementation.devices != ("cpu",)


def usual_case(operator: Operator, *implementations: Implementation) -> Case:
    """The first case worth timing that all of them take on a GPU, else the first of any kind."""
    order = sorted(operator.cases, key=lambda c: "bench" not in c.tags)
    for case in order:
        if "cuda" in case.devices and all(i.supports(case, "cuda") for i in implementations):
            return case
    names = " and ".join(i.name for i in implementations)
    raise WeftError(f"{operator.name}: no case is taken by {names}")


def usual_direction(*implementations: Implementation) -> str:
    """Forward, which every implementation has."""
    assert all(FORWARD in i.directions for i in implementations)
    return FORWARD
