"""Convolution of images with stride 1 and zeros around the image.

    y[n, o, i, j] = sum over c, r, s of weight[o, c, r, s] x[n, c, i + r - padding, j + s - padding]

Source: V. Dumoulin and F. Visin, "A guide to convolution arithmetic for deep learning" (arXiv:1603.07285).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from weft.core import FORWARD, Case, Cost, Input, Operator, Property, WeftError, case
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate

DTYPES = ("float32", "float16", "bfloat16")


def reference(x: torch.Tensor, weight: torch.Tensor, *, padding: int = 0) -> torch.Tensor:
    return F.conv2d(x, weight, padding=padding)


def gradient_scale(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, padding: int = 0
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return, for a coefficient's gradient, the norm of its terms over images and pixels: they may cancel."""
    arguments = (grad.square(), x.square(), weight, None, [1, 1], [padding] * 2, [1, 1], False, [0, 0], 1)
    squares = torch.ops.aten.convolution_backward(*arguments, [False, True, False])[1]
    return None, squares.clamp(min=0).sqrt().nan_to_num(0.0, 0.0, 0.0)


def output_size(x: Any, weight: Any, padding: int) -> tuple[int, int]:
    """Return rows and columns of the output; fewer than 1 if the window does not fit."""
    return tuple(x.shape[d] + 2 * padding - weight.shape[d] + 1 for d in (2, 3))  # type: ignore[return-value]


def empty_output(x: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
    """Return an uninitialised contiguous tensor for the output."""
    return x.new_empty((x.shape[0], weight.shape[0], *output_size(x, weight, padding)))


def check_arguments(x: Any, weight: Any, *, padding: Any = 0) -> None:
    validate.tensor("conv2d", "x", x, DTYPES, dims=range(4, 5))
    validate.tensor("conv2d", "weight", weight, DTYPES, dims=range(4, 5))
    validate.same("conv2d", "x and weight", x, weight)
    if isinstance(padding, bool) or not isinstance(padding, int) or not 0 <= padding < 1 << 20:
        raise WeftError("conv2d: padding", expected="an integer from 0", got=f"{padding!r:.80}")
    if weight.shape[1] != x.shape[1] or 0 in weight.shape:
        raise WeftError(
            "conv2d: weight.shape",
            expected=f"(O, C, R, S) with C = {x.shape[1]}, the channels of x, and no size of 0",
            got=tuple(weight.shape),
        )
    if 0 in x.shape[2:] or min(output_size(x, weight, padding)) < 1:
        raise WeftError(
            "conv2d: x and weight",
            expected="an image with pixels, and a window that fits it when padded",
            got=f"a window of {tuple(weight.shape[2:])}, an image of {tuple(x.shape[2:])}, padding {padding}",
        )


def cost(c: Case, direction: str) -> Cost:
    """Forward is one product over C R S; backward is two of the same size, for x and for the weight."""
    x, weight = c.inputs
    rows, columns = output_size(x, weight, int(c.params["padding"]))  # type: ignore[call-overload]
    pixels = x.shape[0] * rows * columns
    size = ITEMSIZE[x.dtype]
    flops = 2.0 * pixels * weight.numel
    out = pixels * weight.shape[0] * size
    inputs = x.nbytes + weight.nbytes
    if direction == FORWARD:
        return Cost(read=inputs, written=out, flops=flops, rate=SHORT[x.dtype])
    written = (x.numel + weight.numel) * size
    return Cost(read=inputs + out, written=written, flops=2 * flops, rate=SHORT[x.dtype])


def _matches_one_output_channel(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, padding: int = 0
) -> float:
    """Return how far the sum over output channels is from the output of the summed weights.

    In units of the allowed error: one rounding of each output, and float32's roundings of each sum.
    """
    if y.numel() == 0:
        return 0.0
    summed, size = weight.double().sum(0, keepdim=True), weight.double().abs().sum(0, keepdim=True)
    expected = F.conv2d(x.double(), summed, padding=padding)[:, 0]
    sizes = F.conv2d(x.double().abs(), size, padding=padding)[:, 0]
    got = y.double().sum(1)
    finite = expected.isfinite() & got.isfinite()
    allowed = (torch.finfo(y.dtype).eps + 16 * torch.finfo(torch.float32).eps) * sizes
    allowed = allowed + torch.finfo(y.dtype).smallest_normal * weight.shape[0]
    excess = (got - expected).abs()[finite] / allowed[finite].clamp(min=1e-30)
    return float(excess.max()) if excess.numel() else 0.0


def _case(
    image: tuple[int, int, int, int],
    outputs: int,
    window: tuple[int, int] = (3, 3),
    padding: int = 1,
    dtype: str = "float32",
    layout: str = "contiguous",
    values: str = "normal",
    **more: Any,
) -> Case:
    """Return a case named like ``bf16-8x64x56x56-o64-3x3-p1``."""
    x = Input(name="x", shape=image, dtype=dtype, layout=layout, values=values)
    weight = Input(name="weight", shape=(outputs, image[1], *window), dtype=dtype)
    words = [
        SHORT[dtype],
        "x".join(map(str, image)),
        f"o{outputs}",
        "x".join(map(str, window)),
        f"p{padding}",
    ]
    words += [w for w in (layout, values) if w not in ("contiguous", "normal")]
    return case(x, weight, name="-".join(words), padding=padding, **more)


CPU, CUDA = ("cpu",), ("cuda",)
CHECKS = [
    _case((2, 3, 12, 17), 5),
    _case((1, 17, 9, 40), 20, dtype="float16"),
    _case((2, 20, 10, 11), 9, dtype="bfloat16"),
    _case((1, 4, 8, 9), 3, (1, 1), 0),
    _case((1, 2, 7, 30), 4, (2, 5), 0),
    _case((2, 2, 5, 4), 3, (5, 3), 3),
    _case((1, 6, 11, 10), 6, values="outliers"),
]
EDGES = [
    _case((0, 3, 5, 5), 2, tags="edge"),
    _case((1, 1, 1, 1), 1, tags="edge"),
    _case((1, 2, 1, 9), 2, (1, 3), 1, tags="edge"),
    _case((1, 3, 3, 3), 2, (3, 3), 0, tags="edge"),
    *(_case((2, 3, 6, 9), 4, layout=k, tags="edge") for k in ("transposed", "sliced", "shifted")),
    _case((2, 4, 8, 11), 5, values="special", tags="edge"),
    _case((1, 5, 7, 10), 4, dtype="bfloat16", values="special", tags="edge"),
    # Several tiles of pixels and of outputs, several chunks of channels.
    *(_case((2, 70, 37, 75), 130, dtype=d, tags="edge", devices=CUDA) for d in DTYPES),
    _case((1, 19, 30, 50), 67, (7, 7), 3, dtype="bfloat16", tags="edge", devices=CUDA),
]
BENCHES = [
    _case((32, 64, 112, 112), 64, dtype="bfloat16", tags="bench", devices=CUDA),
    _case((32, 256, 56, 56), 256, dtype="bfloat16", tags="bench", devices=CUDA),
    _case((32, 256, 56, 56), 256, (1, 1), 0, dtype="bfloat16", tags="bench", devices=CUDA),
    _case((8, 64, 112, 112), 64, tags="bench", devices=CUDA),
    _case((1, 16, 64, 64), 16, tags="bench", devices=CPU),
]

OPERATOR = Operator(
    name="conv2d",
    summary="convolution of images with stride 1",
    formula="y_noij = sum over c, r, s of w_ocrs x_nc,i+r-p,j+s-p",
    signature="conv2d(x, weight, padding=1)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x", "weight"),
    gradient_scale=gradient_scale,
    scale_reason="a coefficient's gradient is a sum over images and pixels, whose terms cancel",
    properties=(Property(name="is linear in the output channels", holds=_matches_one_output_channel),),
    backward_note="a convolution of the gradient with the turned window; a product over images and pixels",
)
