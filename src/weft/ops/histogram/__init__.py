"""Counts of values by bins; README.md has the definition of a bin, the implementations, ladder and times."""

from __future__ import annotations

import torch

from weft.dispatch.operator import Schema, call, register
from weft.ops.histogram.spec import as_float, check_arguments, refuse_bools

register(
    "histogram",
    Schema(
        inputs="Tensor x, int bins, float? low, float? high",
        gradients=0,
        params=("bins", "low", "high"),
        fake=lambda x, bins, low, high: x.new_empty((bins,), dtype=torch.int64),
        fake_gets_params=True,
    ),
)


def histogram(
    x: torch.Tensor,
    bins: int,
    low: float | None = None,
    high: float | None = None,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """Return how many elements of ``x`` fall into each of ``bins`` bins.

    Integers are their own bin, from 0 to bins - 1. Of floats, bin k has the values from
    ``low + k * (high - low) / bins`` up to the next edge, and the last bin has ``high`` as well. Elements
    outside are not counted, and neither is NaN.

    Args:
        x: tensor of any shape and strides; uint8 or int32, or float32, float16 or bfloat16; CPU or CUDA.
        bins: number of bins, from 1 to 2^24.
        low, high: the range of floats, rounded to float32; between 2^-100 and 2^100 apart. None for integers.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        (bins,) int64, contiguous. Every implementation returns the same counts. The bin of a float is
        ``min(trunc((x - low) * scale), bins - 1)``, where ``scale`` is ``bins / (high - low)``; the
        difference, the product and the scale are each rounded to float32. An element within a rounding of an
        edge is in the bin that this formula gives. It has no gradient.

    Raises:
        WeftError: ``x`` is no tensor, of another dtype or device, or requires a gradient; ``bins``, ``low``
            or ``high`` have no answer; ``impl`` is unknown or does not run here.

    Source: V. Podlozhnyuk, "Histogram calculation in CUDA", NVIDIA, 2007.
    """
    refuse_bools(bins=bins, low=low, high=high)
    low, high = as_float("low", low), as_float("high", high)
    params = {"bins": bins, "low": low, "high": high}
    return call("histogram", (x,), params, impl, lambda: check_arguments(x, **params))  # type: ignore[no-any-return]
