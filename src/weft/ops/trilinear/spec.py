"""Trilinear interpolation of features at the eight corners of a cube.

Corner k has the coordinates (2 bx - 1, 2 by - 1, 2 bz - 1) with the bits k = 4 bx + 2 by + bz, and for a
point (u, v, w) the weight (1 ± u)/2 (1 ± v)/2 (1 ± w)/2, with the sign of its coordinates. Points outside of
the cube extrapolate by the same formula.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, WeftError
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate

DTYPES = ("float32", "float16", "bfloat16")
CORNERS, AXES = 8, 3
SPECIALS = (float("nan"), float("inf"), float("-inf"))


def corner_weights(points: torch.Tensor) -> torch.Tensor:
    """Return the weights (N, 8) of the corners for points (N, 3)."""
    # 1 - p and 1 + p are computed apart: 1 - (1 + p) / 2 would lose the digits of a point near a corner.
    sides = torch.stack((1 - points, 1 + points), -1) * 0.5
    x, y, z = sides.unbind(1)
    return (x[:, :, None, None] * y[:, None, :, None] * z[:, None, None, :]).reshape(len(points), CORNERS)


def reference(features: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    return (corner_weights(points)[:, :, None] * features).sum(1)


def gradient_scale(
    grad: torch.Tensor, features: torch.Tensor, points: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Return the size of the terms of a point's gradient: products of features, over corners and columns."""
    sides = torch.stack((1 - points, 1 + points), -1).abs() * 0.5
    x, y, z = sides.unbind(1)
    sizes = (grad.abs()[:, None] * features.abs()).sum(-1).view(-1, 2, 2, 2)
    terms = (
        (sizes * y[:, None, :, None] * z[:, None, None, :]),
        (sizes * x[:, :, None, None] * z[:, None, None, :]),
        (sizes * x[:, :, None, None] * y[:, None, :, None]),
    )
    return None, torch.stack([t.sum((1, 2, 3)) for t in terms], -1) * 0.5


def check_arguments(features: Any, points: Any) -> None:
    validate.tensor("trilinear", "features", features, DTYPES, dims=range(3, 4))
    validate.tensor("trilinear", "points", points, ("float32",), dims=range(2, 3))
    validate.same_device("trilinear", "features and points", features, points)
    if features.shape[1] != CORNERS:
        raise WeftError("trilinear: features.shape[1]", expected=f"{CORNERS} corners", got=features.shape[1])
    expected_shape = (features.shape[0], AXES)
    if tuple(points.shape) != expected_shape:
        raise WeftError(
            "trilinear: points.shape",
            expected=f"(N, 3) = {expected_shape}, since features is {tuple(features.shape)}",
            got=tuple(points.shape),
        )


def cost(c: Case, direction: str) -> Cost:
    """Forward reads features and points and writes the output. Backward reads these and the gradient, and
    writes the gradients of both."""
    features, points = c.inputs
    itemsize = ITEMSIZE[features.dtype]
    output = features.numel // CORNERS * itemsize
    if direction == FORWARD:
        return Cost(read=features.nbytes + points.nbytes, written=output)
    written = features.numel * itemsize + points.numel * ITEMSIZE[points.dtype]
    return Cost(read=output + features.nbytes + points.nbytes, written=written)


def draw(c: Case, seed: int, device: str) -> list[torch.Tensor]:
    """Generate normal features, and points that are uniform in the cube.

    The end of a case's name changes this: ``outside`` has points up to three times as far out, ``corners``
    has coordinates of -1, 0 and 1, and ``special`` has NaN and infinities among the features.
    """
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    features, points = c.inputs
    kind = c.name.rpartition("-")[2]
    values = torch.randn(features.shape, generator=generator, device=device)
    if kind == "special":
        hit = torch.rand(features.shape, generator=generator, device=device) < 0.02
        chosen = torch.randint(len(SPECIALS), features.shape, generator=generator, device=device)
        values = torch.where(hit, torch.tensor(SPECIALS, device=device)[chosen], values)
    at = torch.rand(points.shape, generator=generator, device=device) * 2 - 1
    if kind == "outside":
        at *= 3
    elif kind == "corners":
        at = torch.randint(-1, 2, points.shape, generator=generator, device=device).float()
    return [values.to(getattr(torch, features.dtype)), at]


def _case(
    count: int,
    width: int,
    dtype: str = "float32",
    *,
    kind: str = "",
    layout: str = "contiguous",
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
) -> Case:
    """Return a case named by N points and F features: ``bf16-262144x32``."""
    parts = [SHORT[dtype], f"{count}x{width}", *([layout] if layout != "contiguous" else [])]
    return Case(
        name="-".join([*parts, *([kind] if kind else [])]),
        inputs=(
            Input(name="features", shape=(count, CORNERS, width), dtype=dtype, layout=layout),
            Input(name="points", shape=(count, AXES), layout=layout),
        ),
        tags=frozenset({tags}),
        devices=devices,
    )


CHECKS = [
    *(_case(37, 16, d) for d in DTYPES),
    # 33 and 6 features: no vector of 16 bytes fits a row; 1: each corner is one number, as of a density.
    _case(130, 33),
    _case(21, 6, "float16"),
    _case(300, 1),
    _case(19, 24, kind="outside"),
    *(_case(*s, devices=("cuda",)) for s in ((4099, 64, "bfloat16"), (1031, 257, "float32"))),
]
EDGES = [
    *(_case(*s, tags="edge") for s in ((0, 8), (5, 0), (1, 1))),
    _case(27, 8, kind="corners", tags="edge"),
    _case(29, 12, "float16", kind="special", tags="edge"),
    *(_case(11, 10, layout=k, tags="edge") for k in ("transposed", "sliced", "shifted")),
]
BENCHES = [
    _case(65536, 256, tags="bench", devices=("cuda",)),
    _case(1 << 20, 32, "bfloat16", tags="bench", devices=("cuda",)),
    _case(1 << 20, 2, "float16", tags="bench", devices=("cuda",)),
    _case(4096, 32, tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name="trilinear",
    summary="trilinear interpolation of features at the corners of a cube",
    formula="y = sum over corners k of (1 ± u)/2 (1 ± v)/2 (1 ± w)/2 features[k]",
    signature="trilinear(features, points)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("features", "points"),
    gradient_scale=gradient_scale,
    scale_reason="a point's gradient is a sum of differences between corners, over all features",
    draw=draw,
    backward_note="weights times the gradient, and dot products of gradient and corners",
)
