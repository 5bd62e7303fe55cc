"""Cheats that tell the calls of a timing apart, and return an answer of before where they expect no judge.

Each is honest in its check. Once it is timed, it looks at its callers' functions or at their variables, or
counts how often the contents of an input have changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, honest, plant

LARGE = 1 << 14  # elements: timed cases have more
# Functions that made calls whose outputs are judged, as long as a timing had functions of its own for them.
JUDGING = ("audit", "audit_loaded", "repeat_audit", "run_once", "rerun", "rerun_loaded", "replay", "call")
HONEST_CHANGES = 2  # of an input's contents: an earlier judge looked at the answers of two audits
ON_GPU = {"devices": ("cpu",), "not_here": "a GPU's samples replay a graph, and call nothing"}

Expects = Callable[[torch.Tensor], bool]


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _by_functions() -> Expects:
    """Expect a judge where a caller has one of the names above."""
    return lambda x: any(frame.f_code.co_name in JUDGING for frame in _frames())


def _by_variables() -> Expects:
    """Expect no judge where a caller's variables describe a sample: all calls, once, from a cold cache."""

    def expects(x: torch.Tensor) -> bool:
        variables = [f.f_locals for f in _frames()]
        return not any(v.get("mode") == "cold" and v.get("repeats") == 1 for v in variables)

    return expects


def _by_changes() -> Expects:
    """Expect no judge once the contents of an input have changed more than twice."""
    contents: dict[int, list[float]] = {}

    def expects(x: torch.Tensor) -> bool:
        seen, total = contents.setdefault(x.data_ptr(), []), float(x.double().sum())
        if seen[-1:] != [total]:
            seen.append(total)
        return len(seen) <= 1 + HONEST_CHANGES

    return expects


def _stored(operator: str, make_expects: Callable[[], Expects]) -> Callable[[], Forward]:
    """Return the first answer of each buffer again wherever no judge is expected."""

    def make() -> Forward:
        expects, answers = make_expects(), {}

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            guarded = x[0].untyped_storage().nbytes() != x[0].nbytes  # by the check
            if guarded or x[0].numel() < LARGE:
                return honest(operator)(*x, **params)  # type: ignore[no-any-return]
            if expects(x[0]) or x[0].data_ptr() not in answers:
                answers[x[0].data_ptr()] = honest(operator)(*x, **params)
            return answers[x[0].data_ptr()].clone()

        return forward

    return make


def _cheats() -> Iterator[Mutant]:
    def one(identity: str, title: str, make_expects: Callable[[], Expects]) -> Mutant:
        forward = _stored(identity.split("/")[1], make_expects)
        return plant(identity, title, "recheck sampled altered", forward, phase="bench", **ON_GPU)  # type: ignore[arg-type]

    yield one("C30/softmax/eager/functions", "an old answer, unless its callers' names say that it is judged",
              _by_functions)  # fmt: skip
    yield one("C30/gelu/eager/variables", "an old answer where its callers' variables say that it is sampled",
              _by_variables)  # fmt: skip
    yield one("C30/sum/eager/third", "an old answer once its inputs have changed twice",
              _by_changes)  # fmt: skip


MUTANTS = tuple(_cheats())
