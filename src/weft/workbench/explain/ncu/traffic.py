"""Comparison of the bytes counted at the DRAM with the compulsory bytes of the operator.

The prediction is the case's :class:`weft.core.Cost`: each input read once, each output written once. A ratio
of 1 means that nothing moves twice. For another ratio the text gives the reasons that the counters show, and
no guesses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.core import Cost
from weft.workbench.explain.ncu.counters import SECTOR
from weft.workbench.explain.ncu.kernel import Kernel
from weft.workbench.report.scales import unit

CLOSE = 0.05  # measured and predicted agree within this share


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of a call, of all its kernels together: predicted, and counted at the DRAM.

    ``left`` are bytes written into the L2 that were still there when the last kernel ended. The call caused
    them, but the DRAM's counters do not include them. None if unknown.
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
        """Measured over predicted bytes; None if no bytes are predicted."""
        return self.measured / self.predicted if self.predicted else None

    @property
    def settled(self) -> float | None:
        """Ratio with the bytes left in the L2 counted as written."""
        if not self.predicted or self.left is None:
            return None
        return (self.measured + self.left) / self.predicted

    @property
    def close(self) -> bool:
        return self.ratio is not None and abs(self.ratio - 1) <= CLOSE

    def lines(self) -> list[str]:
        """Return the moved and the predicted bytes, their ratio, and the visible reasons as lines of text."""
        moved = f"read {_b(self.read)}, written {_b(self.written)}"
        predicted = f"read {_b(self.predicted_read)}, written {_b(self.predicted_written)}"
        line = f"bytes: DRAM {_b(self.measured)} ({moved}) of {_b(self.predicted)} predicted ({predicted})"
        if self.ratio is None:
            return [f"{line}: this case needs none"]
        if self.close:
            return [f"{line}: {self.ratio:.3f} of the prediction, within {100 * CLOSE:.0f} %"]
        which = "more than" if self.ratio > 1 else "less than"
        lines = [f"{line}: {self.ratio:.3f} of the prediction, {which} predicted"]
        return lines + [f"  {reason}" for reason in self.reasons or ("the counters show no reason",)]

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
    """Compare a call's DRAM bytes with the predicted ones; ``l2_bytes`` is the size of the L2."""
    read = sum(k.get("dram_read") or 0.0 for k in kernels)
    written = sum(k.get("dram_write") or 0.0 for k in kernels)
    left = _left_in_l2(kernels, l2_bytes)
    reasons = (*_read_reasons(kernels, cost, read), *_write_reasons(kernels, cost, written, left))
    return Traffic(
        predicted_read=cost.read,
        predicted_written=cost.written,
        read=read,
        written=written,
        left=left,
        reasons=reasons,
    )


def _left_in_l2(kernels: Sequence[Kernel], l2_bytes: int | None) -> float | None:
    """Return the bytes that the last kernel wrote into the L2 and that were still there at its end.

    The tool flushes all caches before each kernel and each pass, so bytes that did not reach the DRAM are in
    the L2. They cannot exceed its size.
    """
    if not kernels or l2_bytes is None:
        return None
    into_l2, to_dram = kernels[-1].get("l2_write"), kernels[-1].get("dram_write")
    if into_l2 is None or to_dram is None:
        return None
    # The two counters can come from different passes, so their difference can be slightly negative.
    return min(max(0.0, into_l2 - to_dram), float(l2_bytes))


def _read_reasons(kernels: Sequence[Kernel], cost: Cost, read: float) -> Iterator[str]:
    """Yield the visible reasons why more or fewer bytes were read than each input once."""
    margin = CLOSE * max(cost.nbytes, 1)
    if read < cost.read - margin:
        yield "fewer bytes were read than the inputs have: some of them were not read"
    if read <= cost.read + margin:
        return
    # The first kernel is left out: it finds cold caches in any cold call.
    later = sum(k.get("dram_read") or 0.0 for k in kernels[1:])
    if later > margin:
        yield (
            f"{len(kernels)} kernels: the later ones read {_b(later)}, and the tool flushes the "
            "caches before each, so that a kernel reads the results of the one before from the DRAM"
        )
    # Spills go through the L1 and L2; only what does not fit there reaches the DRAM.
    spilled = sum(k.spilled or 0.0 for k in kernels)
    if spilled > margin:
        yield f"registers were spilled: {_b(spilled)} of local memory went through the L1"
    for k in kernels:
        used = k.get("ld_used")
        if used is not None and used < 0.75 * SECTOR:
            yield f"{k.short} uses {used:.1f} of the {SECTOR} bytes of each sector that it loads"
    requested = sum(k.get("l2_read") or 0.0 for k in kernels)
    # With several kernels the requests include intermediate results, which are no repeated inputs.
    if len(kernels) == 1 and requested > 1.05 * cost.read and cost.read:
        yield (
            f"it requests its inputs from the L2 {requested / cost.read:.2f} times, and the L2 does not "
            "retain all of them"
        )
    if cost.nbytes < 1 << 20:
        yield "the case is so small that the kernel's code and arguments are a large share"


def _write_reasons(
    kernels: Sequence[Kernel], cost: Cost, written: float, left: float | None
) -> Iterator[str]:
    """Yield the visible reasons why more or fewer bytes were written than each output once."""
    margin = CLOSE * max(cost.nbytes, 1)
    missing = cost.written - written
    if missing > margin and left is not None and left >= 0.5 * missing:
        yield (
            f"{_b(left)} of its output were still in the L2 when the call ended: they reach the "
            "DRAM later, and count for none of its kernels"
        )
    elif missing > margin:
        yield "fewer bytes reached the DRAM than the outputs have, and the L2 does not have them either"
    if written > cost.written + margin and len(kernels) > 1:
        by_earlier = sum(k.get("dram_write") or 0.0 for k in kernels[:-1])
        yield f"the kernels before the last wrote {_b(by_earlier)}, which the next ones read"
    elif written > cost.written + margin:
        into_l2 = kernels[-1].get("l2_write") if kernels else None
        if into_l2 is not None and into_l2 > 1.05 * cost.written:
            yield f"it stores {_b(into_l2)}: some outputs are written more than once"
