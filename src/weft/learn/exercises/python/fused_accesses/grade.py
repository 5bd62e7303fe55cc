"""Grade the counts of known and random chains, with tensors that are used twice or needed in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import require
from weft.learn.probes.returned import function_returning

WRONG = "reads a tensor once"
LUCKY = "needed afterwards"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    separate = function_returning("a number", candidate, "separate")
    fused = function_returning("a number", candidate, "fused")
    gelu = [("t", ["x", "bias"]), ("y", ["t"])]
    chain = [("n", ["x"]), ("r", ["n", "residual"]), ("d", ["r"]), ("y", ["d"])]
    equal = dict.fromkeys(["x", "bias", "residual", "t", "n", "r", "d", "y"], 1)
    yield from _chain(separate, fused, "gelu(x + bias)", gelu, equal, ["y"])
    yield from _chain(separate, fused, "norm, residual, dropout, gelu", chain, equal, ["y"])
    vector = {**equal, "x": 6144, "t": 6144, "y": 6144}
    yield from _chain(separate, fused, "a vector as bias", gelu, vector, ["y"])
    yield from _chain(separate, fused, "x twice", [("t", ["x"]), ("y", ["t", "x"])], equal, ["y"])
    yield from _chain(separate, fused, "r needed too", chain, equal, ["r", "y"])
    for number in range(4):
        steps, sizes, needed = _random_chain(generator)
        yield from _chain(separate, fused, f"random chain {number + 1}", steps, sizes, needed)


def _random_chain(generator: np.random.Generator) -> Any:
    names, steps = ["a", "b", "c"], []
    for step in range(int(generator.integers(2, 6))):
        inputs = generator.choice(names, size=int(generator.integers(1, 4)), replace=False)
        steps.append((f"s{step}", [str(name) for name in inputs]))
        names.append(f"s{step}")
    sizes = {name: int(generator.integers(1, 100)) for name in names}
    needed = [output for output, _ in steps[:-1] if generator.random() < 0.3]
    return steps, sizes, [*needed, steps[-1][0]]


def _chain(separate: Any, fused: Any, name: str, steps: Any, sizes: Any, needed: Any) -> Iterator[str]:
    chain = f"{steps}, needed {needed}"
    every = 0
    for output, inputs in steps:
        every += sizes[output] + sum(sizes[i] for i in inputs)
    actual = separate([(o, list(i)) for o, i in steps], dict(sizes))
    yield require(actual == every, f"separate, {name}", f"expected {every} for {chain}, got {actual}")
    registers: set[str] = set()
    external: set[str] = set()
    repeated = 0
    for output, inputs in steps:
        repeated += sum(sizes[i] for i in inputs if i in external)
        external.update(i for i in inputs if i not in registers)
        registers.add(output)
    reads, writes = sum(sizes[i] for i in external), sum(sizes[o] for o in needed)
    actual = fused([(o, list(i)) for o, i in steps], dict(sizes), list(needed))
    reason = f"expected {reads + writes} for {chain}, got {actual}"
    if repeated and actual == reads + writes + repeated:
        reason += ". A fused kernel reads a tensor once, also if two steps use it"
    elif len(needed) > 1 and actual == reads + sizes[steps[-1][0]]:
        reason += ". All that is needed afterwards must be written, not only the last result"
    yield require(actual == reads + writes, f"fused, {name}", reason)
