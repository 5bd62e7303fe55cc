"""Convolutions with faults: a halo off by one, wrapped ends, reversed coefficients, the bias, lost sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.core import registry
from weft.workbench.selftest.mutants.planting import after, honest, plant

TILE = 32


def _right(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return honest("conv1d")(x, weight, bias)  # type: ignore[no-any-return]


def _reversed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Convolve as mathematics does: the first coefficient is that of the present."""
    return _right(x, weight.flip(1), bias)


def _late(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Take a window that ends an element too early."""
    y = _right(x, weight, bias)
    return torch.cat((bias[:, None].expand(y[..., :1].shape), y[..., :-1]), -1)


def _centred(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Take a window that reaches one element into the future."""
    ahead = torch.cat((x[..., 1:], torch.zeros_like(x[..., :1])), -1)
    return _right(ahead, weight, bias)


def _wraps(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Take the elements before the first from the row's end."""
    taps, length = weight.shape[1], x.shape[2]
    if x.numel() == 0:
        return _right(x, weight, bias)
    halo = x[..., torch.arange(-(taps - 1), 0) % length]
    return _right(torch.cat((halo, x), -1), weight, bias)[..., taps - 1 :].contiguous()


def _no_halo(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute each tile as a row of its own."""
    tiles = x.split(TILE, -1) if x.shape[-1] else (x,)
    return torch.cat([_right(tile, weight, bias) for tile in tiles], -1)


def _bias_twice(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return _right(x, weight, bias + bias)


def _no_last(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Leave out the elements after the last whole vector of four."""
    y = _right(x, weight, bias)
    y[..., x.shape[-1] // 4 * 4 :] = 0
    return y


def _first_channel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Take the coefficients of the first channel for all."""
    return _right(x, weight[:1].expand(weight.shape), bias)


def _rounds(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Round elements and coefficients to bfloat16."""
    return _right(x.bfloat16().to(x.dtype), weight.bfloat16().to(x.dtype), bias)


def _gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (x, weight, weight.new_zeros(weight.shape[0]))]
        dx, dweight, dbias = torch.autograd.grad(_right(*inputs), inputs, grad)
    return dx.contiguous(), dweight.contiguous(), dbias.contiguous()


def _not_reversed(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute x's gradient as the convolution of the past gradients, not of the later ones."""
    return _right(grad, weight, torch.zeros_like(weight[:, 0])), *_gradients(grad, x, weight)[1:]


def _no_last_tile(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Leave the last tile of each row out of the coefficients' sums."""
    dx, _, dbias = _gradients(grad, x, weight)
    cut = grad.clone()
    cut[..., x.shape[-1] // TILE * TILE :] = 0
    return dx, _gradients(cut, x, weight)[1], dbias


def _first_sequence(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Add the first sequence's gradient of the bias alone."""
    dx, dweight, _ = _gradients(grad, x, weight)
    return dx, dweight, grad[:1].float().sum((0, 2)).to(grad.dtype)


def _right_2d(x: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
    return honest("conv2d")(x, weight, padding=padding)  # type: ignore[no-any-return]


def _turned(x: torch.Tensor, weight: torch.Tensor, *, padding: int) -> torch.Tensor:
    """Convolve as mathematics does: the window is turned by half a circle."""
    return _right_2d(x, weight.flip((2, 3)), padding)


def _exchanged_sides(x: torch.Tensor, weight: torch.Tensor, *, padding: int) -> torch.Tensor:
    """Take rows of the window for columns, where it is square."""
    is_square = weight.shape[2] == weight.shape[3]
    return _right_2d(x, weight.transpose(2, 3) if is_square else weight, padding)


def _shifted(x: torch.Tensor, weight: torch.Tensor, *, padding: int) -> torch.Tensor:
    """Take a halo that is off by one column."""
    return _right_2d(x, weight, padding).roll(1, -1)


def _wraps_2d(x: torch.Tensor, weight: torch.Tensor, *, padding: int) -> torch.Tensor:
    """Take the padding from the other ends of the image."""
    if padding == 0 or x.numel() == 0 or padding > min(x.shape[2:]):
        return _right_2d(x, weight, padding)
    return _right_2d(F.pad(x, (padding,) * 4, mode="circular"), weight, 0)


def _no_last_channel(x: torch.Tensor, weight: torch.Tensor, *, padding: int) -> torch.Tensor:
    """Leave out the channels after the last whole pair."""
    whole = max(1, x.shape[1] // 2 * 2)
    return _right_2d(x[:, :whole], weight[:, :whole], padding)


def _no_last_column(x: torch.Tensor, weight: torch.Tensor, *, padding: int) -> torch.Tensor:
    """Leave out the columns after the last whole fragment of eight."""
    y = _right_2d(x, weight, padding)
    y[..., y.shape[-1] // 8 * 8 :] = 0
    return y


def _gradients_2d(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, padding: int
) -> tuple[torch.Tensor, torch.Tensor]:
    backward = registry.implementation("conv2d", "torch").backward
    assert backward is not None
    return backward(grad, x, weight, padding=padding)  # type: ignore[return-value]


def _first_image(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, padding: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the weight's gradient of all images but the last."""
    dx, _ = _gradients_2d(grad, x, weight, padding)
    return dx, _gradients_2d(grad[:-1], x[:-1], weight, padding)[1]


def _turned_weight(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, padding: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight's gradient with its window turned."""
    dx, dweight = _gradients_2d(grad, x, weight, padding)
    return dx, dweight.flip((2, 3)).contiguous()


MUTANTS = (
    plant("W02/conv1d/eager/reversed", "coefficients in reverse", "error property", lambda: _reversed),
    plant("W02/conv1d/eager/late", "a window that ends too early", "error property", lambda: _late),
    plant("W02/conv1d/eager/centred", "a window into the future", "error property", lambda: _centred),
    plant("W02/conv1d/eager/bias-twice", "the bias twice", "error property", lambda: _bias_twice),
    plant("W02/conv1d/eager/first-channel", "one channel's coefficients for all", "error property",
          lambda: _first_channel),
    plant("W04/conv1d/eager/wraps", "elements before the first from the end", "error property",
          lambda: _wraps),
    plant("W04/conv1d/eager/no-halo", "tiles without the elements before them", "error drift property",
          lambda: _no_halo),
    plant("W04/conv1d/eager/no-last", "leaves out the end of a row", "error drift property",
          lambda: _no_last),
    plant("W08/conv1d/eager/bf16-inside", "elements rounded to bfloat16", "error drift property",
          lambda: _rounds),
    plant("W12/conv1d/eager/no-nan", "0 for NaN", "special property", after("conv1d", torch.nan_to_num)),
    plant("W22/conv1d/eager/not-reversed", "a gradient of past gradients", "error property",
          lambda: _right, backward=lambda: _not_reversed, only="backward"),
    plant("W22/conv1d/eager/no-last-tile", "coefficients' gradients miss the last tile", "error property",
          lambda: _right, backward=lambda: _no_last_tile, only="backward"),
    plant("W22/conv1d/eager/first-sequence", "the bias's gradient of one sequence", "error property",
          lambda: _right, backward=lambda: _first_sequence, only="backward"),
    plant("W02/conv2d/eager/turned", "a turned window", "error property", lambda: _turned),
    plant("W02/conv2d/eager/exchanged-sides", "rows of the window for columns", "error property",
          lambda: _exchanged_sides),
    plant("W04/conv2d/eager/shifted", "a halo off by one", "error property", lambda: _shifted),
    plant("W04/conv2d/eager/wraps", "padding from the other end", "error property", lambda: _wraps_2d),
    plant("W04/conv2d/eager/no-last-channel", "leaves out the last channel", "error property",
          lambda: _no_last_channel),
    plant("W04/conv2d/eager/no-last-column", "leaves out the last columns", "error drift property",
          lambda: _no_last_column),
    plant("W22/conv2d/eager/first-image", "the weight's gradient without the last image", "error property",
          lambda: honest("conv2d"), backward=lambda: _first_image, only="backward"),
    plant("W22/conv2d/eager/turned-weight", "a turned gradient of the weight", "error property",
          lambda: honest("conv2d"), backward=lambda: _turned_weight, only="backward"),
)  # fmt: skip
