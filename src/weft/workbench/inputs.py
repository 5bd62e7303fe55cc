"""Inputs: the tensors of a case, from a seed, in the layout and with the values that it names.

Values are drawn on the device itself, a piece at a time, so that a case of over 2^31 elements needs
little more memory than it holds. One seed gives the same bits whatever memory they are put into.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft.core import Case, Input
from weft.workbench.memory import Arena, Block, alias, dense_strides

PIECE = 1 << 26  # elements drawn at once
_SPECIALS = (math.nan, math.inf, -math.inf, 0.0, -0.0)


@dataclass(frozen=True)
class Placed:
    """An input in its memory: ``tensor`` goes to the candidate, ``window`` is written through.

    The window covers each stored element once (an expanded input has one row) and shares memory
    but no version counter with the tensor. ``block`` is its guarded memory, if it has an arena.
    """

    name: str
    spec: Input
    tensor: torch.Tensor
    window: torch.Tensor
    block: Block | None


def make(case: Case, device: str, seed: int, arena: Arena | None = None) -> list[torch.Tensor]:
    """The case's inputs on ``device`` ('cpu' or 'cuda'), each from its own stream of ``seed``.

    With an arena each input lies between guard bands, and the gaps of a sliced one hold poison.
    """
    placed = [place(spec, device, arena) for spec in case.inputs]
    fill_all(placed, case, seed)
    return [one.tensor for one in placed]


def fill_all(placed: Sequence[Placed], case: Case, seed: int) -> None:
    """Draw a seed's values into the memory of all inputs of a case."""
    if case.draw is None:
        for index, one in enumerate(placed):
            fill(one, seed, index)
        return
    device = str(placed[0].window.device)
    for one, drawn in zip(placed, case.draw(seed, device), strict=True):
        one.window.copy_(drawn)


def gradient_like(
    output: torch.Tensor, seed: int, arena: Arena | None = None, device: str | None = None
) -> torch.Tensor:
    """A standard-normal gradient of ``output``: same shape, dtype and device, contiguous."""
    dtype = str(output.dtype).removeprefix("torch.")
    spec = Input(name="grad", shape=tuple(output.shape), dtype=dtype)
    one = place(spec, device or str(output.device), arena)
    fill(one, seed, -1)
    return one.tensor


def place(spec: Input, device: str, arena: Arena | None = None) -> Placed:
    """Memory for one input in its layout, its values not yet drawn (see :func:`fill`)."""
    dtype = getattr(torch, spec.dtype)
    strides, stored_shape, offset = _strides(spec)
    stored_strides = strides[len(strides) - len(stored_shape) :]
    if arena is not None:
        tensor = arena.take(spec.shape, dtype, strides, offset, name=f"input {spec.name!r}")
        block = arena.blocks[-1]
        window = alias(block, stored_shape, dtype, stored_strides)
        return Placed(spec.name, spec, tensor, window, block)
    reach = sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True)) + 1
    base = torch.empty(offset + (reach if spec.numel else 0), dtype=dtype, device=device)
    if spec.layout == "sliced" and dtype.is_floating_point:
        base.fill_(math.nan)
    tensor = base.as_strided(spec.shape, strides, offset)
    if spec.layout == "contiguous":
        tensor = base.view(spec.shape) if spec.shape else base[0]
    window = base.as_strided(stored_shape, stored_strides, offset)
    return Placed(spec.name, spec, tensor, window, None)


def fill(one: Placed, seed: int, index: int) -> None:
    """Draw the values of input number ``index`` for ``seed`` and write them into its memory."""
    window, spec = one.window, one.spec
    if window.numel() == 0:
        return
    generator = torch.Generator(window.device)
    generator.manual_seed((seed * 1_000_003 + index * 7919 + 17) & ((1 << 63) - 1))
    if window.is_contiguous():
        _draw(window.view(-1), spec, generator)
        return
    stored = torch.empty(window.shape, dtype=window.dtype, device=window.device)
    _draw(stored.view(-1), spec, generator)
    window.copy_(stored)


def _strides(spec: Input) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The input's strides, the shape of what is stored, and the offset; all in elements."""
    shape = spec.shape
    strides = dense_strides(shape)
    if spec.layout == "transposed" and len(shape) >= 2:
        swapped = (*shape[:-2], shape[-1], shape[-2])
        inner = dense_strides(swapped)
        return (*inner[:-2], inner[-1], inner[-2]), shape, 0
    if spec.layout == "sliced" and shape:
        wide = dense_strides((*shape[:-1], 2 * shape[-1]))
        return (*wide[:-1], 2), shape, 0
    if spec.layout == "expanded" and len(shape) >= 2:
        empty = math.prod(shape) == 0
        stored = shape if empty else shape[-1:]
        return ((0,) * (len(shape) - 1) + (1,) if not empty else strides), stored, 0
    return strides, shape, 1 if spec.layout == "shifted" else 0


@dataclass(frozen=True)
class _Piece:
    """Where in the whole input a piece lies, for values that depend on the place."""

    start: int
    total: int
    row: int
    constant: float
    generator: torch.Generator


def _draw(flat: torch.Tensor, spec: Input, generator: torch.Generator) -> None:
    """Draw a contiguous 1-D tensor's values, a piece at a time."""
    row = spec.shape[-1] if spec.shape else 1
    first = torch.rand((), generator=generator, device=flat.device)
    constant = 0.5 + first.item()  # of 'equal' only: between 0.5 and 1.5, so that it is never 0
    for start in range(0, flat.numel(), PIECE):
        piece = flat[start : start + PIECE]
        where = _Piece(start, flat.numel(), row, constant, generator)
        if not flat.dtype.is_floating_point:
            high = 2 if flat.dtype is torch.bool else 101
            low = 0 if flat.dtype in (torch.bool, torch.uint8) else -100
            piece.copy_(
                torch.randint(low, high, piece.shape, generator=generator, device=flat.device)
            )
            continue
        _VALUES[spec.values](piece, where)


def _normal(x: torch.Tensor, where: _Piece) -> torch.Tensor:
    return x.normal_(generator=where.generator)


def _places(x: torch.Tensor, where: _Piece) -> torch.Tensor:
    """The index of each element in the whole input, as float64."""
    return torch.arange(where.start, where.start + x.numel(), device=x.device, dtype=torch.float64)


def _offset(x: torch.Tensor, where: _Piece) -> object:
    # A half's step at 1e4 is 8, a bfloat16's 64: noise of 1 would round to nothing at all.
    width = max(1.0, 4e4 * torch.finfo(x.dtype).eps)
    return _normal(x, where).mul_(width).add_(1e4)


def _slope(sign: float) -> Callable[[torch.Tensor, _Piece], object]:
    def draw(x: torch.Tensor, where: _Piece) -> object:
        along = _places(x, where).remainder_(where.row).mul_(100.0 / max(where.row - 1, 1)).sub_(50)
        return _normal(x, where).add_(along.mul_(sign).to(x.dtype))

    return draw


def _sweep(x: torch.Tensor, where: _Piece) -> object:
    step = 120.0 / max(where.total, 1)
    jitter = torch.rand(x.shape, generator=where.generator, device=x.device, dtype=torch.float64)
    return x.copy_(_places(x, where).add_(jitter).mul_(step).sub_(60.0))


def _chance(x: torch.Tensor, where: _Piece, share: float) -> torch.Tensor:
    """A mask that is true at about this share of the elements, and at one at least."""
    hit = torch.rand(x.shape, generator=where.generator, device=x.device) < share
    one = torch.randint(x.numel(), (1,), generator=where.generator, device=x.device)
    return hit.index_fill_(0, one, True)


def _outliers(x: torch.Tensor, where: _Piece) -> object:
    _normal(x, where)
    return x.mul_(torch.where(_chance(x, where, 1e-3), 100.0, 1.0).to(x.dtype))


def _special(x: torch.Tensor, where: _Piece) -> object:
    _normal(x, where)
    each = max(1, x.numel() // 97)
    if x.numel() < len(_SPECIALS):
        each = 1
    count = each * len(_SPECIALS)
    at = torch.randint(x.numel(), (count,), generator=where.generator, device=x.device)
    planted = torch.tensor(_SPECIALS, dtype=x.dtype, device=x.device).repeat(each)
    turn = torch.randint(len(_SPECIALS), (), generator=where.generator, device=x.device)
    # Two kinds may land on one place; which one stays must not depend on the order of a scatter.
    at, order = at.unique(return_inverse=True)
    kept = torch.zeros(at.numel(), dtype=torch.int64, device=x.device)
    kept.scatter_reduce_(0, order, torch.arange(count, device=x.device), "amax")
    x[at] = planted.roll(int(turn))[kept]
    return x


def _neginf(x: torch.Tensor, where: _Piece) -> object:
    return _normal(x, where).masked_fill_(_chance(x, where, 0.25), -math.inf)


_VALUES: dict[str, Callable[[torch.Tensor, _Piece], object]] = {
    "normal": _normal,
    "large": lambda x, w: _normal(x, w).mul_(1e4),
    "offset": _offset,
    "rising": _slope(1.0),
    "falling": _slope(-1.0),
    "equal": lambda x, w: x.fill_(w.constant),
    "ones": lambda x, w: x.fill_(1.0),
    "sweep": _sweep,
    "tiny": lambda x, w: _normal(x, w).mul_(1e-4),
    "outliers": _outliers,
    "special": _special,
    "neginf": _neginf,
}
