"""Many parameters in one launch: a table of addresses and of chunks, kept on the device.

A launch takes parameters of one kind (dtypes), so a list falls into groups. A group's table is one
int64 tensor: a row of ``WIDTH`` for each parameter (the addresses of param, grad, exp_avg,
exp_avg_sq and master, and the number of elements), then a pair for each chunk (the parameter's row,
the chunk's first element). It is written once for a set of addresses and found again by them.
Gradients lie elsewhere at each step: of another table only the rows come from the host, 50 of the
124M's matrices; the pairs, of which they have 30 thousand, follow from sizes alone and are copied
on the device. Nothing here keeps a caller's tensor alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from itertools import chain
from operator import attrgetter, or_
from typing import NamedTuple

import torch

from weft.core import WeftError
from weft.ops.adamw.lists import Tensors

WIDTH = 6
KEPT = 32  # layouts that are remembered; a training loop needs one or two for each list
Kind = tuple[torch.dtype, torch.dtype, torch.dtype]
_dtype = attrgetter("dtype")


class Key(NamedTuple):
    """What must not change for a layout to hold. ``counts`` are the lists' lengths; the others go
    through all tensors, list by list."""

    counts: tuple[int, ...]
    pointers: tuple[int, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    device: int

    def columns(self) -> list[tuple[int, ...]]:
        """The addresses of each list's tensors; zeros for a list that is not there."""
        most, found, at = self.counts[0], [], 0
        for count in self.counts:
            found.append(self.pointers[at : at + count] or (0,) * most)
            at += count
        return found

    def kinds(self) -> list[Kind]:
        """Each parameter's dtype, its gradient's and its averages'."""
        n, dtypes = self.counts[0], self.dtypes
        return list(zip(dtypes[:n], dtypes[n : 2 * n], dtypes[2 * n : 3 * n], strict=True))


_layouts: OrderedDict[Key, Layout] = OrderedDict()


@dataclass(frozen=True)
class Table:
    """``data`` holds ``rows`` rows and then the chunks, of which there are ``chunks``."""

    data: torch.Tensor
    rows: int
    chunks: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters of one kind that are stepped together.

    ``kind`` is the dtypes of parameter, gradient and averages; ``rows`` their places in the lists;
    ``addresses`` of each its five and its size; ``wide`` says that all are 16-byte aligned.
    """

    kind: Kind
    rows: tuple[int, ...]
    addresses: tuple[tuple[int, ...], ...]
    device: torch.device
    masters: bool
    wide: bool
    tables: dict[int, Table] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        return len(self.rows) == 1

    def one(self, lists: Sequence[Tensors]) -> list[torch.Tensor]:
        """The tensors of a group of one; its gradient stands for a master that it has not."""
        (row,) = self.rows
        return [x[row] if x else lists[1][row] for x in lists]

    def chunks(self, chunk: int) -> int:
        return sum(-(-each[-1] // chunk) for each in self.addresses)

    def table(self, chunk: int) -> Table:
        """The table for chunks of this many elements, written when it is first asked for.

        Raises :class:`WeftError` where that is while a CUDA graph is captured.
        """
        found = self.tables.get(chunk)
        if found is None:
            found = self.tables[chunk] = self._write(chunk)
        return found

    def _write(self, chunk: int) -> Table:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise WeftError(
                "adamw: a CUDA graph is captured over tensors that no step has seen",
                expected="one step over these very tensors before the capture",
                got=f"{len(self.rows)} parameters, one of them or its gradient elsewhere",
                hint="keep the gradients' memory: optimizer.zero_grad(set_to_none=False)",
            )
        rows = torch.tensor(list(chain.from_iterable(self.addresses)), dtype=torch.int64)
        pairs = _pairs(tuple(each[-1] for each in self.addresses), chunk, self.device)
        if self.device.type == "cuda":
            # From pinned memory the host does not wait; the allocator holds it until it is read.
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        return Table(torch.cat([rows, pairs]), len(self.rows), len(pairs) // 2)


@lru_cache(maxsize=KEPT)
def _pairs(sizes: tuple[int, ...], chunk: int, device: torch.device) -> torch.Tensor:
    """(row, first element) of every chunk of parameters of these sizes, flat int64."""
    counts = torch.tensor([-(-size // chunk) for size in sizes])
    row = torch.arange(len(sizes)).repeat_interleave(counts)
    before = (counts.cumsum(0) - counts).repeat_interleave(counts)
    at = (torch.arange(len(row)) - before) * chunk
    return torch.stack([row, at], dim=1).flatten().to(device)


@dataclass(frozen=True)
class Layout:
    """How a list falls into groups; parameters of no element are in none."""

    groups: tuple[Group, ...]


def key_of(lists: Sequence[Tensors]) -> Key | None:
    """Addresses, sizes and dtypes of all tensors; None where one is not contiguous: that is looked
    at each time."""
    flat = [t for x in lists for t in x]
    return _key(lists, flat) if all(map(torch.Tensor.is_contiguous, flat)) else None


def _key(lists: Sequence[Tensors], flat: list[torch.Tensor]) -> Key:
    return Key(
        tuple(map(len, lists)),
        tuple(map(torch.Tensor.data_ptr, flat)),
        tuple(map(torch.Tensor.numel, flat)),
        tuple(map(_dtype, flat)),
        flat[0].get_device(),
    )


def layout_of(lists: Sequence[Tensors], key: Key | None = None) -> Layout:
    """The groups of [params, grads, exp_avgs, exp_avg_sqs, masters or none]; all walk alike."""
    if key is None:
        return Layout(
            tuple(_groups(_key(lists, [t for x in lists for t in x]), lists[0][0].device))
        )
    found = _layouts.get(key)
    if found is None:
        found = _layouts[key] = Layout(tuple(_groups(key, lists[0][0].device)))
        while len(_layouts) > KEPT:
            _layouts.popitem(last=False)
    else:
        _layouts.move_to_end(key)
    return found


def _groups(key: Key, device: torch.device) -> list[Group]:
    rows: dict[Kind, list[int]] = {}
    for i, kind in enumerate(key.kinds()):
        if key.sizes[i]:
            rows.setdefault(kind, []).append(i)
    described = list(zip(*key.columns(), key.sizes[: key.counts[0]], strict=True))
    found = []
    for kind, places in rows.items():
        addresses = tuple(described[i] for i in places)
        bits = reduce(or_, (a for each in addresses for a in each[:-1]))
        found.append(
            Group(
                kind=kind,
                rows=tuple(places),
                addresses=addresses,
                device=device,
                masters=bool(key.counts[4]),
                wide=bits % 16 == 0,
            )
        )
    return found
