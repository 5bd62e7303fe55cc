"""Ceilings of a simulated large GPU, and noise, for the study's tests."""

from __future__ import annotations

import numpy as np

from weft.core import Ceilings

# Close to a large GPU's: the bf16 ridge is at 185 FLOPs a byte.
FAST = Ceilings(
    device="toy",
    copy=4.27e12,
    read=4.63e12,
    fill=4.4e12,
    matrix={"bf16": 790e12, "fp32": 51e12},
    measured="never",
)


def noisy(ys: list[float], share: float = 0.01) -> list[float]:
    """Multiply each value by log-normal noise of this share; the seed is fixed."""
    rng = np.random.default_rng(1)
    return [y * float(np.exp(share * e)) for y, e in zip(ys, rng.standard_normal(len(ys)), strict=True)]
