"""Checks of a call's counts that several exercises share, each with the line and the likely mistake."""

from __future__ import annotations

import re

from weft.learn.candidate import Candidate
from weft.learn.cuda_hints import strip_comments
from weft.learn.cuda_program import Counts
from weft.learn.grading import require


def require_coalesced(check: str, counts: Counts, *, limit: float = 1.3) -> str:
    """Refuse loads or stores that touch over ``limit`` times the sectors that their bytes need.

    An access of a warp that does not start at a multiple of 32 bytes touches five sectors and not four, so
    that 1.25 is no mistake.
    """
    for at, kind in ((0, "load"), (3, "store")):
        sectors = getattr(counts, f"{kind}_sectors")
        ideal = getattr(counts, f"{kind}_ideal_sectors")
        line = getattr(counts, f"worst_{kind}")
        far = {name: values[at : at + 3] for name, values in counts.arrays.items()}
        each = ", ".join(
            f"{n / count:.1f} sectors of 32 bytes of {name} ({least / count:.1f} would do)"
            for name, (count, n, least) in far.items()
            if n > limit * least
        )
        require(
            sectors <= limit * ideal,
            f"{check}: coalesced {kind}s",
            f"{f'line {line}: ' if line else ''}on average a warp's {kind} touches {each}. "
            "Let neighbouring threads access neighbouring elements",
        )
    return f"{check}: coalesced loads and stores"


def require_conflict_free(check: str, counts: Counts, *, limit: float = 0.0) -> str:
    """Refuse accesses to shared memory with over ``limit`` bank conflicts a request."""
    requests = max(1, counts.shared_requests)
    return require(
        counts.bank_conflicts <= limit * requests,
        f"{check}: bank conflicts",
        f"{f'line {counts.worst_shared}: ' if counts.worst_shared else ''}{counts.bank_conflicts} "
        "bank conflicts in "
        f"{counts.shared_requests} accesses of warps to shared memory, expected "
        f"{f'at most {int(limit * requests)}' if limit else 'none'}: lanes access different words of "
        "one bank",
    )


def require_active(check: str, counts: Counts, *, share: float) -> str:
    """Refuse a kernel in which less than ``share`` of the lanes are active on average."""
    return require(
        counts.active_lanes >= share,
        f"{check}: active lanes",
        f"{f'line {counts.worst_idle}: ' if counts.worst_idle else ''}only {counts.active_lanes:.0%} "
        "of the lanes are "
        f"active on average, expected {share:.0%}: lanes of one warp go different paths",
    )


def require_shared(candidate: Candidate, name: str) -> str:
    """Refuse an array declared without ``__shared__``: other threads do not see a local array's elements."""
    declared = re.findall(rf"([\w ]*)\bfloat\s+{name}\s*\[", strip_comments(candidate.text))
    return require(
        all("__shared__" in words for words in declared),
        f"{name}: __shared__",
        f"without __shared__ before it, {name} is a local array: each thread has its own, and reads only "
        "what it wrote itself",
    )


def require_through_shared(check: str, counts: Counts, *, name: str, source: str, elements: int) -> str:
    """Refuse a kernel that takes its result from elsewhere than shared memory, or loads the source twice."""
    require(counts.shared_requests > 0, f"{check}: {name}", f"the {name} in shared memory is not used")
    require(
        counts.shared_loads > 0,
        f"{check}: {name}",
        f"the {name} in shared memory is not used: it is written, and nothing reads it",
    )
    return require(
        counts.load_bytes <= 4 * elements,
        f"{check}: loads",
        f"{counts.load_bytes // 4} elements are loaded from {source}, which has {elements}: load each once "
        f"into {name}, and take the result from {name}",
    )
