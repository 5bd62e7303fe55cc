"""Subjects of ``weft inspect``: the operators, implementations and cases that a command may name."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from weft.core import Case, Implementation, Operator, WeftError, registry
from weft.core.operator import unknown_name
from weft.workbench.calls.selection import known_implementations

COMPILED_BACKENDS = ("triton", "cuda", "numba")
INTERPRETER_SWITCHES = {"triton": "TRITON_INTERPRET", "numba": "NUMBA_ENABLE_CUDASIM"}


def disable_interpreters() -> None:
    """Make this process compile kernels instead of interpreting them; call it before triton or numba loads.

    Raises :class:`WeftError` if one of them is already imported as an interpreter.
    """
    for module, variable in INTERPRETER_SWITCHES.items():
        if module in sys.modules and os.environ.get(variable) == "1":
            raise WeftError(
                f"{module} was imported to interpret kernels, and cannot compile them now",
                hint=f"inspect in a process of its own, or with {variable}=0 from its start",
            )
        os.environ[variable] = "0"


class Subjects:
    """Operators and implementations that a command may name: Weft's own, and those of files.

    Files are executed in this process. They can falsify nothing here: inspection only compiles the
    kernels that they define, and gives no verdict.
    """

    def __init__(self, files: Sequence[str] = ()) -> None:
        from weft.workbench.sources.source import Source, load

        for file in files:
            if not Path(file).is_file():
                raise WeftError("--with", expected="a .py or .cu file", got=file)
        loaded = [load(Source(kind="file", path=str(Path(f).resolve()))) for f in files]
        self.operators = {o.name: o for file in loaded for o in file.operators}
        self.external = [i for file in loaded for i in file.implementations]

    def operator(self, name: str) -> Operator:
        """Return the operator of this name; raises :class:`WeftError` with the nearest names."""
        return self.operators[name] if name in self.operators else registry.operator(name)

    def implementations(self, operator: str) -> dict[str, Implementation]:
        """Return an operator's implementations by name, external ones last."""
        return known_implementations(self.operator(operator), self.external)

    def implementation(self, operator: str, name: str) -> Implementation:
        """Return the implementation of this name; raises :class:`WeftError` with the nearest names."""
        known = self.implementations(operator)
        if name not in known:
            raise unknown_name(f"implementation of {operator}", name, list(known))
        return known[name]

    def compilable(self, operator: str) -> list[Implementation]:
        """Return the implementations whose kernels compile without a GPU; only external ones if any do."""
        compilable = [i for i in self.implementations(operator).values() if has_kernels(i)]
        return [i for i in compilable if i in self.external] or compilable


def has_kernels(implementation: Implementation) -> bool:
    """Return True if the implementation has GPU kernels of its own that a toolchain here compiles."""
    return implementation.backend in COMPILED_BACKENDS and implementation.devices != ("cpu",)


def default_case(operator: Operator, *implementations: Implementation) -> Case:
    """Return the first bench case that all implementations support on a GPU, else the first other case."""
    # The sort is stable: bench cases first, otherwise the operator's own order.
    for case in sorted(operator.cases, key=lambda c: "bench" not in c.tags):
        if "cuda" in case.devices and all(i.supports(case, "cuda") for i in implementations):
            return case
    names = " and ".join(i.name for i in implementations)
    raise WeftError(f"{operator.name}: no case is supported by {names}")
