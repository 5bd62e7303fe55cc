"""Grade the sum at multiples of the block, beside them and below one block; memory behind z is guarded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from weft.learn.candidate import Candidate
from weft.learn.grading import compare, odd_sizes, require

WRONG = "the store needs the mask"
LUCKY = "The last block, which is not full, is missing"
GUARD = 512  # elements behind z that a kernel must leave alone


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    add = candidate.function("add")
    for n in (256, 65, 1, 63, *odd_sizes(generator, low=100, high=700)):
        x = generator.standard_normal(n, dtype=np.float32)
        y = generator.standard_normal(n, dtype=np.float32)
        memory = torch.full((n + GUARD,), float("nan"))
        add(torch.from_numpy(x.copy()), torch.from_numpy(y.copy()), memory[:n])
        beyond = torch.nonzero(~memory[n:].isnan()).flatten().tolist()
        yield require(
            not beyond,
            f"n = {n}: memory behind z",
            f"element {n + beyond[0] if beyond else 0} was written, and z has {n}: the store needs the mask",
        )
        yield compare(f"n = {n}", memory[:n].numpy(), x + y, mistake=_mistake)


def _mistake(output: np.ndarray) -> str:
    unwritten = np.isnan(output)
    if unwritten.all():
        return "No element of z was written"
    if unwritten.any() and unwritten[np.argmax(unwritten) :].all():
        return "The last block, which is not full, is missing: its program did not run or stored nothing"
    return ""
