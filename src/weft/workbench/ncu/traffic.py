"""Bytes counted at the DRAM against the bytes that the operator cannot do without.

The prediction is the case's :class:`weft.core.Cost`: each input read once, each output written
once. A ratio of 1 is a kernel that moves nothing twice. Where it is not 1, what the counters show
of the reason is said, and what they do not show is not guessed at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.core import Cost
from weft.workbench.ncu.counters import SECTOR
from weft.workbench.ncu.kernel import Kernel
from weft.workbench.report.scales import unit

CLOSE = 0.05  # measured and predicted agree within this share


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of a call: predicted, and counted at the DRAM, all its kernels together.

    ``left`` is what was written into the L2 and was still there when the last kernel ended: it is
    not among the DRAM's bytes, though the call caused it. None where that cannot be told.
    """

    predicted_read: int
    predicted_written: int
    read: float
    written: float
    left: float | None = None
    reasons: tuple[str, ...] = field(default=())

    @property
    def predicted(self) -> int:
        return self.predicted_read + self.predicted_written

    @property
    def measured(self) -> float:
        return self.read + self.written

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing needs to be moved."""
        return self.measured / self.predicted if self.predicted else None

    @property
    def settled(self) -> float | None:
        """The same with what was left in the L2 counted as written."""
        if not self.predicted or self.left is None:
            return None
        return (self.measured + self.left) / self.predicted

    @property
    def close(self) -> bool:
        return self.ratio is not None and abs(self.ratio - 1) <= CLOSE

    def lines(self) -> list[str]:
        """What was moved and what had to be, the ratio, and the reasons that can be seen."""
        moved = f"read {_b(self.read)}, written {_b(self.written)}"
        due = f"read {_b(self.predicted_read)}, written {_b(self.predicted_written)}"
        found = (
            f"bytes: DRAM {_b(self.measured)} ({moved}) of {_b(self.predicted)} predicted ({due})"
        )
        if self.ratio is None:
            return [f"{found}: this case needs none"]
        if self.close:
            return [f"{found}: {self.ratio:.3f} of the prediction, within {100 * CLOSE:.0f} %"]
        which = "more than" if self.ratio > 1 else "less than"
        told = [f"{found}: {self.ratio:.3f} of the prediction, {which} predicted"]
        return told + [f"  {reason}" for reason in self.reasons or ("the counters show no reason",)]

    def to_json(self) -> dict[str, Any]:
        return {
            "predicted_read": self.predicted_read,
            "predicted_written": self.predicted_written,
            "read": self.read,
            "written": self.written,
            "left_in_l2": self.left,
            "ratio": self.ratio,
            "settled_ratio": self.settled,
            "within_5_percent": self.close,
            "reasons": list(self.reasons),
        }


def _b(value: float) -> str:
    return unit(float(value), "B")


def compare(kernels: Sequence[Kernel], cost: Cost, l2_bytes: int | None) -> Traffic:
    """A call's DRAM bytes beside its predicted ones. ``l2_bytes`` is the size of the L2."""
    read = sum(k.get("dram_read") or 0.0 for k in kernels)
    written = sum(k.get("dram_write") or 0.0 for k in kernels)
    left = _left(kernels, l2_bytes)
    reasons = (*_of_reads(kernels, cost, read), *_of_writes(kernels, cost, written, left))
    return Traffic(
        predicted_read=cost.read,
        predicted_written=cost.written,
        read=read,
        written=written,
        left=left,
        reasons=reasons,
    )


def _left(kernels: Sequence[Kernel], l2_bytes: int | None) -> float | None:
    """Bytes that the last kernel wrote into the L2 and that were still there at its end.

    Before each kernel (and each of the tool's passes) all caches are flushed, so what the DRAM did
    not get in it can only be in the L2; more than the L2 holds it cannot be.
    """
    if not kernels or l2_bytes is None:
        return None
    into, out = kernels[-1].get("l2_write"), kernels[-1].get("dram_write")
    if into is None or out is None:
        return None
    return min(max(0.0, into - out), float(l2_bytes))


def _of_reads(kernels: Sequence[Kernel], cost: Cost, read: float) -> Iterator[str]:
    """Why more or less was read than each input once, as far as the counters show it."""
    much = CLOSE * max(cost.nbytes, 1)
    if read < cost.read - much:
        yield "fewer bytes were read than the inputs have: not all of them were looked at"
    if read <= cost.read + much:
        return
    later = sum(k.get("dram_read") or 0.0 for k in kernels[1:])
    if later > much:
        yield (
            f"{len(kernels)} kernels: the later ones read {_b(later)}, and the tool flushes the "
            "caches before each, so that what one leaves for the next is read from the DRAM"
        )
    spilled = sum(k.spilled or 0.0 for k in kernels)
    if spilled > much:
        yield f"registers were spilled: {_b(spilled)} of local memory went through the L1"
    for k in kernels:
        used = k.get("ld_used")
        if used is not None and used < 0.75 * SECTOR:
            yield f"{k.short} uses {used:.1f} of the {SECTOR} bytes of each sector that it loads"
    asked = sum(k.get("l2_read") or 0.0 for k in kernels)
    if len(kernels) == 1 and asked > 1.05 * cost.read and cost.read:
        yield (
            f"it asks the L2 for its inputs {asked / cost.read:.2f} times over, and the L2 does "
            "not keep all of them"
        )
    if cost.nbytes < 1 << 20:
        yield "so small a case moves little beside the kernel's code and its arguments"


def _of_writes(
    kernels: Sequence[Kernel], cost: Cost, written: float, left: float | None
) -> Iterator[str]:
    """Why more or less was written than each output once, as far as the counters show it."""
    much = CLOSE * max(cost.nbytes, 1)
    missing = cost.written - written
    if missing > much and left is not None and left >= 0.5 * missing:
        yield (
            f"{_b(left)} of what it wrote were still in the L2 when the call ended: they reach "
            "the DRAM later, and count for none of its kernels"
        )
    elif missing > much:
        yield "fewer bytes reached the DRAM than the outputs have, and the L2 did not keep them all"
    if written > cost.written + much and len(kernels) > 1:
        early = sum(k.get("dram_write") or 0.0 for k in kernels[:-1])
        yield f"the kernels before the last wrote {_b(early)}, which the next ones read"
    elif written > cost.written + much:
        into = kernels[-1].get("l2_write") if kernels else None
        if into is not None and into > 1.05 * cost.written:
            yield f"it stores {_b(into)}: some outputs are written more than once"
