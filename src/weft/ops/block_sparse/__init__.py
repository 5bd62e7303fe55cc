"""The linear layer whose weight is stored in blocks (BSR); README.md has the format and the kernels."""

from __future__ import annotations

import torch

from weft.dispatch.autocast import lowered
from weft.dispatch.operator import Schema, call, register
from weft.ops._common.offsets import can_read
from weft.ops.block_sparse.blocks import to_blocks, to_dense, transposed_index
from weft.ops.block_sparse.spec import check_arguments, check_indices

__all__ = ["block_sparse_linear", "to_blocks", "to_dense", "transposed_index"]

_PATTERN = "Tensor x, Tensor values, Tensor crow, Tensor col, Tensor transposed"

register(
    "block_sparse_linear",
    Schema(
        inputs=f"{_PATTERN}, Tensor bias",
        saved=_PATTERN,
        gradients=3,
        fake=lambda x, values, crow, col, transposed, bias: x.new_empty((*x.shape[:-1], bias.shape[0])),
        fake_backward=lambda grad, x, values, crow, col, transposed: (
            x.new_empty(x.shape),
            values.new_empty(values.shape),
            grad.new_empty(grad.shape[-1]),
        ),
    ),
)


def block_sparse_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    crow: torch.Tensor,
    col: torch.Tensor,
    transposed: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return x W^T + b for a weight W (N, K) of stored blocks, summed in float32, rounded once.

    Args:
        x: (..., K); float32, float16 or bfloat16; CPU or CUDA; any strides.
        values: (blocks, b, b), the stored blocks of W row of blocks after row of blocks; b is 16, 32, 64 or
            128 and divides N and K; the dtype and device of x.
        crow: (N / b + 1,) int32: row of blocks i has the blocks ``crow[i]`` to ``crow[i + 1] - 1``.
        col: (blocks,) int32, the column of each in units of blocks, in any order and also more than once in
            a row. ``weft.ops.block_sparse.to_blocks(w, b, density)`` returns these three.
        transposed: ``weft.ops.block_sparse.transposed_index(crow, col, K // b)``, for the gradient of x.
            None: each backward computes it, which takes a sort of the columns.
        bias: (N,); the same dtype and device. None adds zeros.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True is refused: no implementation declares it yet.

    Returns:
        (..., N), contiguous, of x's dtype and device. Differentiable in x, values and bias. An infinity or
        NaN of x meets stored blocks alone: rows of W without a block there are not touched by it.

    Raises:
        WeftError: shapes, dtypes or devices do not fit; on a CPU, an index is out of range or ``transposed``
            is of another pattern; ``impl`` is unknown or does not run here.

    On a GPU no call reads the indices on the host, which would wait for the device. ``eager``, ``triton`` and
    ``cuda`` never use a column out of range as an address: its block adds nothing. ``torch`` hands all
    indices to the library unread. ``weft.ops.block_sparse.spec.check_indices`` reads them and raises.

    Source: S. Gray, A. Radford and D. P. Kingma, "GPU kernels for block-sparse weights", OpenAI, 2017.
    """
    if isinstance(values, torch.Tensor) and values.dim() == 3 and isinstance(crow, torch.Tensor):
        if transposed is None:
            transposed = crow.new_empty(0)
        if bias is None:
            # The kernels always add a bias: zeros are N of the M N elements that are written.
            bias = values.new_zeros(max(0, crow.numel() - 1) * values.shape[1])
    x, values, bias = lowered(x, values, bias)
    inputs = (x, values, crow, col, transposed, bias)

    def check() -> None:
        check_arguments(*inputs)

    if can_read(col):
        check()
        assert transposed is not None  # or the check raised
        check_indices(crow, col, transposed, x.shape[-1] // values.shape[1])
    return call("block_sparse_linear", inputs, {}, impl, check, batch_invariant)  # type: ignore[no-any-return]
