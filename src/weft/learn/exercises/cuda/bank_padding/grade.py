"""Grade the sums, the bank conflicts of the tile, and the sectors of the loads."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.cuda_checks import require_coalesced, require_conflict_free, require_shared
from weft.learn.cuda_hints import strip_comments
from weft.learn.cuda_program import Program
from weft.learn.grading import Refused, compare, odd_sizes, quarters

WRONG = "lanes access different words of one bank"
LUCKY = "Let neighbouring threads access neighbouring elements"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    yield require_shared(candidate, "tile")
    program = Program(candidate, "void run(const float* x, float* sums, int rows)")
    for rows in (32, 64, 1, *odd_sizes(generator, low=33, high=300, count=2)):
        x = quarters(generator, -9, 9, (rows, 32))
        sums = program.empty("sums", rows)
        counts = program.call("run", program.array("x", x), sums, rows, case=f"{rows} rows")
        yield compare(f"{rows} rows", sums.read(), x.sum(axis=1))
        yield require_coalesced(f"{rows} rows", counts)
        try:
            yield require_conflict_free(f"{rows} rows", counts)
        except Refused as refused:
            size = re.search(r"__shared__[^;]*\[\s*(\d+)\s*\]\s*;", strip_comments(candidate.text))
            if size is None or int(size[1]) % 32:
                raise
            reason = f"{refused.reason}. A row is {'still ' if size[1] == '32' else ''}{size[1]} words"
            raise Refused(refused.check, f"{reason}: pad the second size, by one word") from refused
