"""2:4 sparsity: of each four elements of a weight two stay; README.md has the format and the kernels."""

from __future__ import annotations

import torch

from weft.dispatch.autocast import lowered
from weft.dispatch.operator import Schema, call, register
from weft.ops.sparse24 import pattern
from weft.ops.sparse24.spec import check_expand, check_linear, check_prune, check_transposable


def _fake_pair(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = w.shape
    metadata = w.new_empty(pattern.metadata_shape(rows, columns), dtype=torch.int32)
    return w.new_empty((rows, columns // 2)), metadata


def _fake_matrix(values: torch.Tensor, metadata: torch.Tensor) -> torch.Tensor:
    return values.new_empty((values.shape[0], 2 * values.shape[1]))


register(
    "prune_2_4",
    Schema(
        inputs="Tensor w",
        saved="Tensor metadata",
        fake=_fake_pair,
        fake_backward=lambda grad, metadata: (_fake_matrix(grad, metadata),),
        outputs=2,
    ),
)
register(
    "prune_2_4_transposable",
    Schema(
        inputs="Tensor w",
        gradients=0,
        fake=lambda w: (*_fake_pair(w), *_fake_pair(w.t())),
        outputs=4,
    ),
)
register(
    "expand_2_4",
    Schema(
        inputs="Tensor values, Tensor metadata",
        saved="Tensor metadata",
        fake=_fake_matrix,
        fake_backward=lambda grad, metadata: (grad.new_empty((grad.shape[0], grad.shape[1] // 2)),),
    ),
)
register(
    "sparse_linear",
    Schema(
        inputs="Tensor x, Tensor values, Tensor metadata, Tensor bias",
        saved="Tensor x, Tensor values, Tensor metadata",
        gradients=3,
        fake=lambda x, values, metadata, bias: x.new_empty((*x.shape[:-1], values.shape[0])),
        fake_backward=lambda grad, x, values, metadata: (
            x.new_empty(x.shape),
            values.new_empty(values.shape),
            values.new_empty(values.shape[0]),
        ),
    ),
)


def prune_2_4(
    w: torch.Tensor, *, impl: str | None = None, batch_invariant: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two elements of largest magnitude of each four adjacent ones of a row, and their places.

    Args:
        w: (rows, columns), such as a weight (out, in); columns are a multiple of four; float32, float16 or
            bfloat16; CPU or CUDA; any strides.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True is refused: no implementation declares it yet.

    Returns:
        ``values`` (rows, columns / 2), in the order of their columns, and ``metadata``
        (ceil(columns / 64), 8 ceil(rows / 128), 32) int32, which names their places in the order that
        Hopper's sparse tensor cores read (weft.ops.sparse24.pattern). Of equal magnitudes the lower place
        stays; NaN counts as the largest. Together they have 9/16 of the bytes of w where w has whole blocks
        of 128 rows and 64 columns. The gradient of a value goes to its element.

    Raises:
        WeftError: ``w`` is no such matrix; ``impl`` is unknown or does not run here.

    Source: A. Mishra et al., "Accelerating sparse deep neural networks", arXiv:2104.08378.
    """
    return call("prune_2_4", (w,), {}, impl, lambda: check_prune(w), batch_invariant)  # type: ignore[no-any-return]


def prune_2_4_transposable(
    w: torch.Tensor, *, impl: str | None = None, batch_invariant: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a matrix and its transpose, pruned with one mask that is 2:4 in both.

    The elements of each tile of 4 x 4 are taken by falling magnitude, as long as at most two of a row and of
    a column stay. The mask keeps at least half of the sum of magnitudes that the best mask keeps; a group may
    have fewer than two elements, and is filled up with the value 0 at the lowest free places.

    Args:
        w: (rows, columns), both multiples of four; float32, float16 or bfloat16; CPU or CUDA; any strides.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True is refused: no implementation declares it yet.

    Returns:
        ``values`` and ``metadata`` of w, as :func:`prune_2_4` returns them, then those of its transpose
        (columns, rows). Equal magnitudes are taken row by row; NaN counts as the largest. There is no
        gradient.

    Raises:
        WeftError: ``w`` is no such matrix, or requires a gradient; ``impl`` is unknown or does not run here.

    Source: I. Hubara et al., "Accelerated sparse neural training: a provable and efficient method to find N:M
    transposable masks", arXiv:2102.08124, the greedy method.
    """
    name = "prune_2_4_transposable"
    return call(name, (w,), {}, impl, lambda: check_transposable(w), batch_invariant)  # type: ignore[no-any-return]


def expand_2_4(
    values: torch.Tensor,
    metadata: torch.Tensor,
    *,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return the dense matrix of values and metadata: the values at their places, 0 elsewhere.

    Args:
        values, metadata: as :func:`prune_2_4` returns them. The two places of a group must differ.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True is refused: no implementation declares it yet.

    Returns:
        (rows, columns), contiguous, of values' dtype and device. Differentiable in ``values``.

    Raises:
        WeftError: shapes, dtypes or devices do not fit; ``impl`` is unknown or does not run here.
    """
    inputs = (values, metadata)
    return call("expand_2_4", inputs, {}, impl, lambda: check_expand(*inputs), batch_invariant)  # type: ignore[no-any-return]


def sparse_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return x W^T + b for a weight W = ``expand_2_4(values, metadata)``, summed in float32, rounded once.

    Args:
        x: (..., K); float32, float16 or bfloat16; CPU or CUDA; any strides.
        values, metadata: of a weight (N, K), as :func:`prune_2_4` returns them; the dtype and device of x.
        bias: (N,); the same dtype and device. None adds zeros.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True is refused: no implementation declares it yet.

    Returns:
        (..., N), contiguous, of x's dtype and device. Differentiable in x, values and bias. An infinity or
        NaN of x at a place that was pruned gives NaN or nothing, by the implementation.

    Raises:
        WeftError: shapes, dtypes or devices do not fit; ``impl`` is unknown or does not run here.

    Source: A. Mishra et al., "Accelerating sparse deep neural networks", arXiv:2104.08378.
    """
    if bias is None and isinstance(values, torch.Tensor) and values.dim() == 2:
        # The kernels always add a bias: zeros are N of the M N elements that are written.
        bias = values.new_zeros(values.shape[0])
    x, values, bias = lowered(x, values, bias)
    inputs = (x, values, metadata, bias)
    return call("sparse_linear", inputs, {}, impl, lambda: check_linear(*inputs), batch_invariant)  # type: ignore[no-any-return]
