"""Checks of a call's counts that several exercises share, each with the line and the likely mistake."""

from __future__ import annotations

from weft.learn.cuda_program import Counts
from weft.learn.grading import require


def require_coalesced(check: str, counts: Counts, *, limit: float = 1.3) -> str:
    """Refuse loads or stores that touch over ``limit`` times the sectors that their bytes need.

    An access of a warp that does not start at a multiple of 32 bytes touches five sectors and not four, so
    that 1.25 is no mistake.
    """
    for kind in ("load", "store"):
        sectors = getattr(counts, f"{kind}_sectors")
        ideal = getattr(counts, f"{kind}_ideal_sectors")
        requests = max(1, getattr(counts, f"{kind}_requests"))
        line = getattr(counts, f"worst_{kind}")
        require(
            sectors <= limit * ideal,
            f"{check}: coalesced {kind}s",
            f"{f'line {line}: ' if line else ''}a warp's {kind} touches {sectors / requests:.1f} "
            "sectors of 32 bytes "
            f"on average, and {ideal / requests:.1f} would do. Let neighbouring threads access "
            "neighbouring elements",
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
