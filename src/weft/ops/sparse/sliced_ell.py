"""Sliced ELL: a format for matrices that are multiplied many times and whose rows are about equally long.

Rows lie in slices of 32, padded to the longest row of their slice. Sorting the rows of a window by length
first makes the slices' rows alike. The conversion runs on the matrix's device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from weft.backends.nvrtc import CudaSource
from weft.core import WeftError
from weft.dispatch import devices
from weft.ops._common import validate
from weft.ops._common.layout import CUDA_TYPES, dtype_name
from weft.ops._common.offsets import piece_numbers
from weft.ops.sparse.spec import DTYPES, check_arguments, check_indices
from weft.ops.sparse.transpose import widened

SLICE = 32  # rows of a slice, one for each lane of a warp
THREADS = 128
PADDING = -1


@cache
def source(dtype: torch.dtype) -> CudaSource:
    """Return the program for one dtype."""
    return CudaSource(
        file=Path(__file__).with_name("sliced_ell.cu"),
        kernels=("sliced_ell",),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), ("THREADS", str(THREADS))),
        label=f"sliced-ell-{dtype_name(dtype)}",
    )


@dataclass(frozen=True)
class SlicedEll:
    """A matrix in sliced ELL.

    ``values`` and ``columns`` (int32) have a slot for each entry and for each padding, whose column is -1.
    ``starts`` (slices + 1,) is the first slot of each slice. ``order`` (rows,) is the row of the matrix in
    each place.
    """

    values: Tensor
    columns: Tensor
    starts: Tensor
    order: Tensor
    num_columns: int

    @staticmethod
    def from_csr(
        values: Tensor, columns: Tensor, offsets: Tensor, num_columns: int, window: int = 1
    ) -> SlicedEll:
        """Convert a matrix in CSR; the host waits for the number of slots, and checks all indices.

        ``window``: the rows of each so many are sorted by length; 1 sorts none. Raises :class:`WeftError`
        if the tensors do not fit or an index is out of range.
        """
        check_arguments("spmv", values, columns, offsets, values.new_empty(num_columns))
        check_indices("spmv", columns, offsets, num_columns)
        lengths, rows = offsets.diff().long(), offsets.shape[0] - 1
        order = torch.arange(rows, device=offsets.device)
        if window > 1:
            order = lengths.argsort(descending=True, stable=True)
            order = order[(order // window).argsort(stable=True)]
        by_slice = torch.nn.functional.pad(lengths[order], (0, -rows % SLICE)).view(-1, SLICE)
        widths = by_slice.amax(1) if rows else by_slice.new_zeros(0)
        starts = torch.nn.functional.pad((widths * SLICE).cumsum(0), (1, 0))
        slots = int(starts[-1])
        row = piece_numbers(offsets, values.shape[0])
        rank = torch.arange(values.shape[0], device=row.device) - offsets.long()[row]
        places = torch.empty_like(order)
        places[order] = torch.arange(rows, device=order.device)
        target = starts[places[row] // SLICE] + rank * SLICE + places[row] % SLICE
        padded = columns.new_full((slots,), PADDING).index_put_((target,), columns)
        return SlicedEll(
            values.new_zeros(slots).index_put_((target,), values.detach()), padded, starts, order, num_columns
        )

    @property
    def num_rows(self) -> int:
        return self.order.shape[0]

    def product(self, x: Tensor) -> Tensor:
        """Return the product with a vector (num_columns,), without a gradient.

        Raises :class:`WeftError` if x does not fit.
        """
        where = "sliced ELL"
        validate.tensor(where, "x", x, DTYPES, dims=range(1, 2))
        validate.same(where, "values and x", self.values, x)
        if x.shape[0] != self.num_columns:
            raise WeftError(f"{where}: x", expected=f"{self.num_columns} elements", got=x.shape[0])
        x = x.detach().contiguous()
        y = x.new_empty(self.num_rows)
        if self.num_rows == 0:
            return y
        if x.is_cpu:
            return self._on_cpu(x)
        return devices.call_on(x.get_device(), self.launch, x, y)  # type: ignore[no-any-return]

    def launch(self, x: Tensor, y: Tensor) -> Tensor:
        """Launch the kernel for a contiguous x and its output y on the current device; return y."""
        tensors = (self.values, self.columns, self.starts, self.order, x, y)
        blocks = -(-self.num_rows // THREADS)
        source(x.dtype)["sliced_ell"](blocks, THREADS, *tensors, self.num_rows, self.num_columns)
        return y

    def _on_cpu(self, x: Tensor) -> Tensor:
        filled = (self.columns != PADDING).nonzero().flatten()
        products = widened(self.values)[filled] * widened(x)[self.columns[filled].long()]
        at = (torch.searchsorted(self.starts, filled, right=True) - 1) * SLICE + filled % SLICE
        sums = products.new_zeros(self.num_rows).index_add_(0, at, products)
        return torch.empty_like(sums).index_copy_(0, self.order, sums).to(x.dtype)
