"""Inputs of a case: tensors generated from a seed, in the layout and with the values of the case.

Values are generated on the device, a piece at a time, so a case of over 2^31 elements needs little more
memory than its inputs. One seed gives the same bits in any memory and layout.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft.core import Case, Input
from weft.core.cases import FLOAT8
from weft.workbench.calls.guarded_memory import Arena, Block, alias, dense_strides

PIECE = 1 << 26  # elements generated at once: float64 temporaries of 512 MiB
# A seed above THINNED says that of one input only a part is kept, see `thinned_seed`.
THINNED, MAX_DIMS, KEPT_PARTS = 1 << 40, 16, 8
_SPECIALS = (math.nan, math.inf, -math.inf, 0.0, -0.0)


@dataclass(frozen=True)
class AllocatedInput:
    """Allocated input: the candidate gets ``tensor``, and values are written through ``window``.

    The window covers each stored element once (an expanded input has one row). It shares memory but no
    version counter with the tensor. ``block`` is the guarded memory, None without an arena.
    """

    name: str
    spec: Input
    tensor: torch.Tensor
    window: torch.Tensor
    block: Block | None


def make(case: Case, device: str, seed: int, arena: Arena | None = None) -> list[torch.Tensor]:
    """Generate the case's inputs on ``device`` ('cpu' or 'cuda'), each from its own stream of ``seed``.

    With an arena each input lies between guard bands, and the gaps of a sliced one hold poison.
    """
    if case.draw is not None and arena is None:
        return _make_by_draw(case, device, seed)
    allocated = [allocate(spec, device, arena) for spec in case.inputs]
    fill_all(allocated, case, seed)
    return [i.tensor for i in allocated]


def _make_by_draw(case: Case, device: str, seed: int) -> list[torch.Tensor]:
    """Generate inputs with the case's own generator; copy only what may be in use elsewhere.

    A copy of gigabytes would be most of what this process needs beside a candidate and a reference.
    """
    assert case.draw is not None
    part, whole_seed = divmod(seed, THINNED)
    values, allocated, unshared = list(case.draw(whole_seed, device)), [], _count_unshared()
    assert len(values) == len(case.inputs), "the case's generator makes each input"
    for spec in reversed(case.inputs):
        value = values.pop()
        if _count_references(value) == unshared and _is_due(value, spec, device):
            allocated.append(AllocatedInput(spec.name, spec, value, value.data, None))
            continue
        allocated.append(allocate(spec, device))
        allocated[-1].window.copy_(value)
    allocated.reverse()
    _thin(allocated, part)
    return [i.tensor for i in allocated]


def _is_due(value: torch.Tensor, spec: Input, device: str) -> bool:
    """Return True for a plain tensor in the form of the input that fills memory of torch's own allocator."""
    if (
        type(value) is not torch.Tensor
        or value.requires_grad
        or value.device.type != torch.device(device).type
    ):
        return False
    if (value.shape, value.dtype) != (spec.shape, getattr(torch, spec.dtype)):
        return False
    if spec.layout != "contiguous" or not value.is_contiguous():
        return False
    storage = value.untyped_storage()
    # Memory that cannot be resized belongs to others, such as a numpy array.
    return storage.nbytes() == value.nbytes and storage.resizable()


def _count_references(value: torch.Tensor) -> tuple[int, int]:
    """Return how many references there are to a tensor, and how many uses of its memory."""
    storage = value.untyped_storage()
    return sys.getrefcount(value), torch._C._storage_Use_Count(storage._cdata)


def _count_unshared() -> tuple[int, int]:
    """Return these counts for a tensor that only a variable of the calling function refers to."""
    value = torch.empty(1)
    return _count_references(value)


def thinned_seed(seed: int, index: int, dim: int) -> int:
    """Return the seed of the same inputs with zeros in seven eighths of input ``index`` along ``dim``."""
    return seed + THINNED * (1 + index * MAX_DIMS + dim)


def fill_all(allocated: Sequence[AllocatedInput], case: Case, seed: int) -> None:
    """Write a seed's values into the memory of all inputs of a case."""
    part, seed = divmod(seed, THINNED)
    _fill_whole(allocated, case, seed)
    _thin(allocated, part)


def _thin(allocated: Sequence[AllocatedInput], part: int) -> None:
    """Write zeros into seven eighths of one input, as :func:`thinned_seed` numbers it; nothing for 0."""
    if part:
        index, dim = divmod(part - 1, MAX_DIMS)
        window = allocated[index].window
        length = window.shape[dim] // KEPT_PARTS
        window.narrow(dim, length, window.shape[dim] - length).zero_()


def _fill_whole(allocated: Sequence[AllocatedInput], case: Case, seed: int) -> None:
    if case.draw is None:
        for index, allocated_input in enumerate(allocated):
            fill(allocated_input, seed, index)
        return
    device = str(allocated[0].window.device)
    values = list(case.draw(seed, device))
    assert len(values) == len(allocated), "the case's generator makes each input"
    for allocated_input in reversed(allocated):
        allocated_input.window.copy_(values.pop())  # released as soon as it is copied


def gradient_like(
    output: torch.Tensor, seed: int, arena: Arena | None = None, device: str | None = None
) -> torch.Tensor:
    """Generate a standard-normal gradient of ``output``: same shape, dtype and device, contiguous."""
    dtype = str(output.dtype).removeprefix("torch.")
    spec = Input(name="grad", shape=tuple(output.shape), dtype=dtype)
    grad = allocate(spec, device or str(output.device), arena)
    fill(grad, seed, -1)
    return grad.tensor


def allocate(spec: Input, device: str, arena: Arena | None = None) -> AllocatedInput:
    """Allocate memory for one input in its layout; :func:`fill` writes the values."""
    dtype = getattr(torch, spec.dtype)
    strides, stored_shape, offset = _strides(spec)
    stored_strides = strides[len(strides) - len(stored_shape) :]
    if arena is not None:
        tensor = arena.take(spec.shape, dtype, strides, offset, name=f"input {spec.name!r}")
        block = arena.blocks[-1]
        window = alias(block, stored_shape, dtype, stored_strides)
        return AllocatedInput(spec.name, spec, tensor, window, block)
    reach = sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True)) + 1
    base = torch.empty(offset + (reach if spec.numel else 0), dtype=dtype, device=device)
    if spec.layout == "sliced" and dtype.is_floating_point:
        base.fill_(math.nan)  # a kernel that ignores the strides reads the gaps
    tensor = base.as_strided(spec.shape, strides, offset)
    if spec.layout == "contiguous":
        tensor = base.view(spec.shape) if spec.shape else base[0]
    window = base.as_strided(stored_shape, stored_strides, offset)
    return AllocatedInput(spec.name, spec, tensor, window, None)


def fill(allocated: AllocatedInput, seed: int, index: int) -> None:
    """Generate the values of input number ``index`` for ``seed`` and write them into its memory."""
    window, spec = allocated.window, allocated.spec
    if window.numel() == 0:
        return
    generator = torch.Generator(window.device)
    # One stream for each pair of seed and index: primes keep neighbouring pairs apart.
    generator.manual_seed((seed * 1_000_003 + index * 7919 + 17) & ((1 << 63) - 1))
    if window.is_contiguous():
        _generate(window.view(-1), spec, generator)
        return
    # Generated contiguously and then copied: random values written through strides would depend on
    # the layout, and one seed must give the same values in every layout.
    stored = torch.empty(window.shape, dtype=window.dtype, device=window.device)
    _generate(stored.view(-1), spec, generator)
    window.copy_(stored)


def _round_to_float8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 values in an 8-bit dtype: finite ones saturate; NaN for Inf where it has no Inf.

    torch's own conversion of values out of range differs between its versions.
    """
    largest = torch.finfo(dtype).max
    finite = values.clamp(-largest, largest)
    infinity = math.inf if dtype == torch.float8_e5m2 else math.nan
    return torch.where(values.isinf(), values.sign() * infinity, finite).to(dtype)


def _strides(spec: Input) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the input's strides, the shape of its stored elements and the offset, in elements."""
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
    """Position of a piece in the whole input, for values that depend on it.

    ``first`` is a random number from 0 to 1 of the whole input.
    """

    start: int
    total: int
    row: int
    first: torch.Tensor
    generator: torch.Generator


def _generate(flat: torch.Tensor, spec: Input, generator: torch.Generator) -> None:
    """Generate the values of a contiguous 1-D tensor, a piece at a time."""
    row = spec.shape[-1] if spec.shape else 1
    first = torch.rand((), generator=generator, device=flat.device)
    for start in range(0, flat.numel(), PIECE):
        piece = flat[start : start + PIECE]
        position = _Piece(start, flat.numel(), row, first, generator)
        if not flat.dtype.is_floating_point:
            high = 2 if flat.dtype is torch.bool else 101
            low = 0 if flat.dtype in (torch.bool, torch.uint8) else -100
            piece.copy_(torch.randint(low, high, piece.shape, generator=generator, device=flat.device))
            continue
        if spec.dtype in FLOAT8:  # torch fills no such tensor
            wide = torch.empty(piece.shape, dtype=torch.float32, device=flat.device)
            _VALUES[spec.values](wide, position)
            piece.copy_(_round_to_float8(wide, flat.dtype))
            continue
        _VALUES[spec.values](piece, position)


def _normal(x: torch.Tensor, position: _Piece) -> torch.Tensor:
    return x.normal_(generator=position.generator)


def _indexes(x: torch.Tensor, position: _Piece) -> torch.Tensor:
    """Return the index of each element in the whole input, as float64."""
    return torch.arange(position.start, position.start + x.numel(), device=x.device, dtype=torch.float64)


def _offset(x: torch.Tensor, position: _Piece) -> object:
    # At 1e4 neighbouring fp16 numbers are 8 apart and bf16 numbers 64: noise of 1 would round away.
    width = max(1.0, 4e4 * torch.finfo(x.dtype).eps)
    return _normal(x, position).mul_(width).add_(1e4)


def _slope(sign: float) -> Callable[[torch.Tensor, _Piece], object]:
    def generate(x: torch.Tensor, position: _Piece) -> object:
        along = _indexes(x, position).remainder_(position.row).mul_(100.0 / max(position.row - 1, 1)).sub_(50)
        return _normal(x, position).add_(along.mul_(sign).to(x.dtype))

    return generate


def _sweep(x: torch.Tensor, position: _Piece) -> object:
    step = 120.0 / max(position.total, 1)
    jitter = torch.rand(x.shape, generator=position.generator, device=x.device, dtype=torch.float64)
    return x.copy_(_indexes(x, position).add_(jitter).mul_(step).sub_(60.0))


def _random_mask(x: torch.Tensor, position: _Piece, share: float) -> torch.Tensor:
    """Return a mask that is true for about this share of the elements, and for at least one."""
    hit = torch.rand(x.shape, generator=position.generator, device=x.device) < share
    one = torch.randint(x.numel(), (1,), generator=position.generator, device=x.device)
    return hit.index_fill_(0, one, True)


def _outliers(x: torch.Tensor, position: _Piece) -> object:
    _normal(x, position)
    return x.mul_(torch.where(_random_mask(x, position, 1e-3), 100.0, 1.0).to(x.dtype))


def _special(x: torch.Tensor, position: _Piece) -> object:
    _normal(x, position)
    each = max(1, x.numel() // 97)
    if x.numel() < len(_SPECIALS):
        each = 1
    count = each * len(_SPECIALS)
    at = torch.randint(x.numel(), (count,), generator=position.generator, device=x.device)
    planted = torch.tensor(_SPECIALS, dtype=x.dtype, device=x.device).repeat(each)
    rotation = torch.randint(len(_SPECIALS), (), generator=position.generator, device=x.device)
    # Two special values may get the same index. The result must not depend on the order in which a
    # scatter writes them, so duplicates are removed first and the last one wins.
    at, order = at.unique(return_inverse=True)
    last_of_each = torch.zeros(at.numel(), dtype=torch.int64, device=x.device)
    last_of_each.scatter_reduce_(0, order, torch.arange(count, device=x.device), "amax")
    x[at] = planted.roll(int(rotation))[last_of_each]
    return x


def _neginf(x: torch.Tensor, position: _Piece) -> object:
    return _normal(x, position).masked_fill_(_random_mask(x, position, 0.25), -math.inf)


def _nan(x: torch.Tensor, position: _Piece) -> object:
    return _normal(x, position).masked_fill_(_random_mask(x, position, 0.01), math.nan)


_VALUES: dict[str, Callable[[torch.Tensor, _Piece], object]] = {
    "normal": _normal,
    "large": lambda x, w: _normal(x, w).mul_(1e4),
    "offset": _offset,
    "rising": _slope(1.0),
    "falling": _slope(-1.0),
    "equal": lambda x, w: x.fill_(0.5 + w.first.item()),  # never 0
    "ones": lambda x, w: x.fill_(1.0),
    "sweep": _sweep,
    "tiny": lambda x, w: _normal(x, w).mul_(1e-4),
    "outliers": _outliers,
    "special": _special,
    "neginf": _neginf,
    "nan": _nan,
}
