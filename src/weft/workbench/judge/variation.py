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


def seed_generators(seed: int) -> None:
    """Seed every global random generator that a file may use: torch's, numpy's and Python's."""
    random.seed(seed)
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


def _factor(noise: torch.Tensor) -> torch.Tensor:
    low, high = FACTORS
    return low + (high - low) * noise


def _around_zero(noise: torch.Tensor) -> torch.Tensor:
    return ADDED * (noise - 0.5)


def constant_weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights of a model whose elements are all equal: what :func:`vary_weights` changes.

    These are floating parameters (ones, zeros), and buffers of several elements (running statistics).
    """
    for tensor in model.state_dict(keep_vars=True).values():
        least = 1 if isinstance(tensor, torch.nn.Parameter) else 2
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.numel() < least:
            continue
        flat = tensor.detach().reshape(-1)
        if bool((flat == flat[0]).all()):
            yield tensor


def vary_weights(model: torch.nn.Module, seed: int) -> None:
    """Give other values to the constant weights of a model. A positive one stays positive.

    The values follow from the seed, the constant and the number of elements, not from the name: a
    candidate that calls its weights otherwise gets the same.
    """
    seen: Counter[tuple[int, float]] = Counter()
    for tensor in constant_weights(model):
        key = (tensor.numel(), float(tensor.detach().reshape(-1)[0]))
        generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, *key, seen[key])).encode()))
        seen[key] += 1
        noise = torch.rand(tensor.numel(), generator=generator).view(tensor.shape)
        values = key[1] * _factor(noise) if key[1] else _around_zero(noise)
        if (
            not key[1] and max(tensor.shape, default=1) < tensor.numel()
        ):  # of a matrix: its products stay near 1
            values = values / math.sqrt(tensor.shape[-1])
        with torch.no_grad():
            tensor.copy_(values)


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
