"""Groups of parameters that one launch steps together, and their tables of addresses on the device.

A launch takes parameters with the same dtypes, so a list is split into groups. A group's table is one int64
tensor: a row of ``ROW_WIDTH`` numbers for each parameter (the addresses of param, grad, exp_avg, exp_avg_sq
and master, and the number of elements), then a pair for each chunk (the parameter's row, the chunk's first
element). A table is written once for a set of addresses and cached by them. Gradients have new addresses in
each step: then only the rows are copied from the host. The pairs follow from the sizes alone; they stay on
the device. The caches keep no tensor of the caller alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from itertools import chain
from operator import attrgetter, or_
from typing import NamedTuple

import torch

from weft.core import WeftError
from weft.ops._common.layout import dense
from weft.ops.adamw.step import Tensors

ROW_WIDTH = 6
CACHE_SIZE = 32  # sets of addresses; a training loop needs one or two for each list
Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]  # of a parameter, its gradient and its averages
_dtype = attrgetter("dtype")


class ListsKey(NamedTuple):
    """Identity of contiguous lists of tensors. ``counts`` are the lists' lengths; the other fields go through
    all tensors, list by list."""

    counts: tuple[int, ...]
    pointers: tuple[int, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    device: int

    def addresses_by_list(self) -> list[tuple[int, ...]]:
        """Return the addresses of each list's tensors; zeros for a list that is absent."""
        columns, start = [], 0
        for count in self.counts:
            columns.append(self.pointers[start : start + count] or (0,) * self.counts[0])
            start += count
        return columns

    def dtypes_by_parameter(self) -> list[Dtypes]:
        n, dtypes = self.counts[0], self.dtypes
        return list(zip(dtypes[:n], dtypes[n : 2 * n], dtypes[2 * n : 3 * n], strict=True))


_cached_groups: OrderedDict[ListsKey, tuple[Group, ...]] = OrderedDict()


@dataclass(frozen=True)
class Table:
    """``data`` is ``rows`` rows of ``ROW_WIDTH`` and then ``chunks`` pairs, on the device."""

    data: torch.Tensor
    rows: int
    chunks: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters with the same dtypes, which are stepped together.

    ``indices`` are their positions in the lists. ``rows`` has five addresses and a size for each of them.
    ``aligned``: all addresses are multiples of 16 bytes.
    """

    dtypes: Dtypes
    indices: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    device: torch.device
    masters: bool
    aligned: bool
    tables: dict[int, Table] = field(default_factory=dict)

    @property
    def is_single(self) -> bool:
        """True for a group of one parameter, which is stepped by its addresses, without a table."""
        return len(self.indices) == 1

    def single_tensors(self, lists: Sequence[Tensors]) -> list[torch.Tensor]:
        """Return the tensors of a single parameter; its gradient replaces an absent master."""
        (index,) = self.indices
        return [x[index] if x else lists[1][index] for x in lists]

    def count_chunks(self, chunk: int) -> int:
        return sum(-(-row[-1] // chunk) for row in self.rows)

    def table(self, chunk: int) -> Table:
        """Return the table for chunks of this many elements, written at the first request.

        Raises :class:`WeftError` if the first request comes while a CUDA graph is captured.
        """
        table = self.tables.get(chunk)
        if table is None:
            table = self.tables[chunk] = self._write(chunk)
        return table

    def _write(self, chunk: int) -> Table:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise WeftError(
                "adamw: a CUDA graph is captured over tensors that no step has seen",
                expected="one step over these very tensors before the capture",
                got=f"{len(self.indices)} parameters, one of them or its gradient at a new address",
                hint="keep the gradients' memory: optimizer.zero_grad(set_to_none=False)",
            )
        rows = torch.tensor(list(chain.from_iterable(self.rows)), dtype=torch.int64)
        pairs = _pairs(tuple(row[-1] for row in self.rows), chunk, self.device)
        if self.device.type == "cuda":
            # The host does not wait for a copy from pinned memory; torch's pinned allocator reuses the memory
            # only after the copy.
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        return Table(torch.cat([rows, pairs]), len(self.indices), len(pairs) // 2)


@lru_cache(maxsize=CACHE_SIZE)
def _pairs(sizes: tuple[int, ...], chunk: int, device: torch.device) -> torch.Tensor:
    """Return (row, first element) of every chunk of parameters of these sizes, flat int64."""
    counts = torch.tensor([-(-size // chunk) for size in sizes])
    row = torch.arange(len(sizes)).repeat_interleave(counts)
    # `before` is the number of chunks of earlier parameters, for each chunk.
    before = (counts.cumsum(0) - counts).repeat_interleave(counts)
    first = (torch.arange(len(row)) - before) * chunk
    return torch.stack([row, first], dim=1).flatten().to(device)


def key_of(lists: Sequence[Tensors]) -> ListsKey | None:
    """Return the key of lists; None if a tensor is not contiguous: such lists are examined in each step."""
    tensors = [t for x in lists for t in x]
    # The key is built in each step: map over C functions costs less than a Python call for each tensor.
    return _key(lists, tensors) if all(map(torch.Tensor.is_contiguous, tensors)) else None


def _key(lists: Sequence[Tensors], tensors: list[torch.Tensor]) -> ListsKey:
    return ListsKey(
        tuple(map(len, lists)),
        tuple(map(torch.Tensor.data_ptr, tensors)),
        tuple(map(torch.Tensor.numel, tensors)),
        tuple(map(_dtype, tensors)),
        tensors[0].get_device(),
    )


def groups_of(lists: Sequence[Tensors], key: ListsKey) -> tuple[Group, ...]:
    """Return the cached groups of [params, grads, exp_avgs, exp_avg_sqs, masters or none]."""
    groups = _cached_groups.get(key)
    if groups is None:
        # A freed tensor's address may come back for another tensor: size, dtype and device are in the key,
        # and an entry with these and the addresses equal is valid for it.
        groups = _cached_groups[key] = _split_by_dtypes(key, lists[0][0].device)
        while len(_cached_groups) > CACHE_SIZE:
            _cached_groups.popitem(last=False)
    else:
        # Least recently used first: a loop that alternates between lists keeps all of them.
        _cached_groups.move_to_end(key)
    return groups


def _split_by_dtypes(key: ListsKey, device: torch.device) -> tuple[Group, ...]:
    """Split parameters into groups; empty parameters are in none."""
    # Insertion order: groups and rows follow the caller's list, so that the random bits do not depend on
    # hashing.
    indices_by_dtypes: dict[Dtypes, list[int]] = {}
    for i, dtypes in enumerate(key.dtypes_by_parameter()):
        if key.sizes[i]:
            indices_by_dtypes.setdefault(dtypes, []).append(i)
    all_rows = list(zip(*key.addresses_by_list(), key.sizes[: key.counts[0]], strict=True))
    groups = []
    for dtypes, indices in indices_by_dtypes.items():
        rows = tuple(all_rows[i] for i in indices)
        address_bits = reduce(or_, (address for row in rows for address in row[:-1]))
        groups.append(
            Group(
                dtypes=dtypes,
                indices=tuple(indices),
                rows=rows,
                device=device,
                masters=bool(key.counts[4]),
                aligned=address_bits % 16 == 0,
            )
        )
    return tuple(groups)


def prepare_groups(lists: Sequence[Tensors], key: ListsKey, *chunks: int) -> tuple[Group, ...]:
    """Return the groups of contiguous lists, with their tables for these chunks on the device."""
    groups = groups_of(lists, key)
    for group in groups:
        for chunk in () if group.is_single else chunks:
            group.table(chunk)
    return groups


def step_groups(
    lists: Sequence[Tensors], step: Callable[[Sequence[Tensors], tuple[Group, ...]], None]
) -> None:
    """Call ``step(lists, groups)`` on [params, grads, exp_avgs, exp_avg_sqs, masters or none].

    Kernels use one index for all tensors of a parameter. A parameter whose tensors have different strides is
    stepped on contiguous copies, which are copied back.
    """
    if not lists[0]:
        return
    key = key_of(lists)
    if key is not None:
        if groups := groups_of(lists, key):
            step(lists, groups)
        return
    present = [x for x in lists if x]
    mismatched = [i for i, tensors in enumerate(zip(*present, strict=True)) if not _same_strides(tensors)]
    copies = [list(x) for x in lists]
    for tensors in copies:
        for i in mismatched:
            if tensors:
                tensors[i] = tensors[i].contiguous()
    key = _key(copies, [t for x in copies for t in x])
    if groups := _split_by_dtypes(key, lists[0][0].device):
        step(copies, groups)
    for number, (tensors, originals) in enumerate(zip(copies, lists, strict=True)):
        for i in mismatched:
            if number != 1 and tensors and tensors[i] is not originals[i]:  # list 1, gradients, is read only
                originals[i].copy_(tensors[i])


def _same_strides(tensors: Sequence[torch.Tensor]) -> bool:
    """True if these have no gaps and equal strides."""
    first = tensors[0]
    return dense(first) is first and all(t.stride() == first.stride() for t in tensors)
