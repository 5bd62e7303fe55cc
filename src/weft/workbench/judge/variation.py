"""Inputs and weights that vary: what a problem's own code draws, and what it leaves constant.

A candidate may leave out what never changes: a mask that is always false, or the weight of a norm that
is always 1. So constants get other values, alike in the judge's process and in the worker's: inputs
that do not vary with the seed at every seed, and constant weights in one set of weights.
"""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

FLIPPED = 0.25  # share of a mask's elements that get its other value
FACTORS = (0.5, 1.5)  # range of the factor of a constant that is not 0: its sign stays
ADDED = 0.5  # width of the range around 0 of the values in place of zeros
CONSTANT_SHARE = 1 / 8  # of a parameter's elements that are exactly 0 or 1: random ones hardly ever are


def seed_generators(seed: int) -> None:
    """Seed every global random generator that a file may use: torch's, numpy's and Python's."""
    random.seed(seed)
    # NumPy takes seeds of 32 bits only.
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the states of all global random generators at the end of the context."""
    # Only the current device: by default fork_rng saves the state of every GPU of the machine.
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def can_vary(tensor: torch.Tensor) -> bool:
    """Return True if :func:`vary` can change a tensor: it is floating or boolean, and not empty."""
    return tensor.numel() > 0 and (tensor.is_floating_point() or tensor.dtype is torch.bool)


def vary(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return other values for a constant input, which follow from ``seed``.

    Of a mask (booleans, or two values) some elements get the other value. Other numbers are
    multiplied by random factors, so that they keep their signs, and zeros become numbers around 0.
    """
    generator = torch.Generator(tensor.device)
    generator.manual_seed(seed)
    noise = torch.rand(tensor.shape, generator=generator, device=tensor.device)
    if tensor.dtype is torch.bool:
        return tensor ^ (noise < FLIPPED)
    wide = tensor.float() if tensor.itemsize == 1 else tensor  # float8 has no arithmetic
    low, high = wide.min(), wide.max()
    if bool(low < high) and bool(((wide == low) | (wide == high)).all()):
        other = torch.where(wide == low, high, low)
        return torch.where(noise < FLIPPED, other, wide).to(tensor.dtype)
    return torch.where(wide == 0, _around_zero(noise), wide * _factor(noise)).to(tensor.dtype)


def is_partly_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if a share of the floating elements of two draws is equal, which chance does not explain.

    Zeros, ones and infinities do not count: they are the structure of a triangle, a diagonal or a mask.
    """
    if not one.is_floating_point() or one.itemsize < 2 or one.shape != other.shape:
        return False
    equal = (one == other) & one.isfinite() & (one != 0) & (one.abs() != 1)
    return int(equal.count_nonzero()) >= CONSTANT_SHARE * one.numel()


def _factor(noise: torch.Tensor) -> torch.Tensor:
    low, high = FACTORS
    return low + (high - low) * noise


def _around_zero(noise: torch.Tensor) -> torch.Tensor:
    return ADDED * (noise - 0.5)


def constant_weights(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, float]]:
    """Yield the weights of a model that hold a constant, and the constant: what :func:`vary_weights` changes.

    These are floating parameters of which a share of at least ``CONSTANT_SHARE`` is one value (ones, zeros),
    and buffers all of whose elements are equal (running statistics). A buffer of one element counts if it is
    0, which turns a part of the model off; another number, such as a scale, may be written into a kernel.
    """
    for tensor in model.state_dict(keep_vars=True).values():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or not tensor.numel():
            continue
        flat = tensor.detach().reshape(-1)
        first, is_parameter = float(flat[0]), isinstance(tensor, torch.nn.Parameter)
        if bool((flat == first).all()):
            if is_parameter or flat.numel() > 1 or first == 0.0:
                yield tensor, first
        elif is_parameter:
            # Not of a buffer: that may be a mask, whose zeros and ones are its meaning.
            for value in (0.0, 1.0):
                if int((flat == value).count_nonzero()) >= CONSTANT_SHARE * flat.numel():
                    yield tensor, value


def vary_weights(model: torch.nn.Module, seed: int) -> None:
    """Give other values to the constant weights of a model. A positive one stays positive.

    The values follow from the seed, the constant and the number of elements, not from the name: a
    candidate that calls its weights otherwise gets the same.
    """
    seen: Counter[tuple[int, float]] = Counter()
    for tensor, value in list(constant_weights(model)):
        key = (tensor.numel(), value)
        # A seed of all of these that judge and worker compute alike, whatever the weight is called.
        generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, *key, seen[key])).encode()))
        # Two weights of one size and value get different noise, by their order.
        seen[key] += 1
        noise = torch.rand(tensor.numel(), generator=generator).view(tensor.shape)
        values = value * _factor(noise) if value else _around_zero(noise)
        # Of a matrix: its products stay near 1.
        if not value and max(tensor.shape, default=1) < tensor.numel():
            values = values / math.sqrt(tensor.shape[-1])
        with torch.no_grad():
            tensor.copy_(torch.where(tensor == value, values.to(tensor), tensor))


def count_special(outputs: Sequence[torch.Tensor]) -> int:
    """Return the number of NaN and Inf in outputs."""
    return sum(int((~o.isfinite()).count_nonzero()) for o in outputs if o.is_floating_point())


def is_taken(run: Callable[[], Sequence[torch.Tensor]], usual: int) -> bool:
    """Return True if a reference takes changed values: it raises nothing and has no more NaN and Inf.

    ``usual`` is :func:`count_special` of its outputs at the usual values.
    """
    try:
        return count_special(run()) <= usual
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - the file's code may raise anything
        return False
