"""Many parameters in one launch: a table of addresses and of chunks, kept on the device.

A launch takes parameters of one kind (dtypes), so a list falls into groups. A group's table is one
int64 tensor: a row of ``WIDTH`` for each parameter (the addresses of param, grad, exp_avg,
exp_avg_sq and master, and the number of elements), then a pair for each chunk (the parameter's row,
the chunk's first element). It is written once for a set of addresses and found again by them: a
step costs the host a look at every tensor, and no more. Nothing here keeps a caller's tensor alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from weft.core import WeftError
from weft.ops.adamw.lists import Tensors

WIDTH = 6
KEPT = 32  # layouts that are remembered; a training loop needs one or two for each list
Kind = tuple[torch.dtype, torch.dtype, torch.dtype]
Key = tuple[Any, ...]

_layouts: OrderedDict[Key, Layout] = OrderedDict()
_dtype = attrgetter("dtype")


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
        rows = [x for each in self.addresses for x in each]
        pairs = [
            x
            for i, e in enumerate(self.addresses)
            for at in range(0, e[-1], chunk)
            for x in (i, at)
        ]
        data = torch.tensor([*rows, *pairs], dtype=torch.int64)
        if self.device.type == "cuda":
            # From pinned memory the host does not wait; the allocator holds it until it is read.
            data = data.pin_memory().to(self.device, non_blocking=True)
        return Table(data, len(self.rows), len(pairs) // 2)


@dataclass(frozen=True)
class Layout:
    """How a list falls into groups; parameters of no element are in none."""

    groups: tuple[Group, ...]


def key_of(lists: Sequence[Tensors]) -> Key | None:
    """What must not change for a layout to hold: addresses, sizes and dtypes of all tensors.

    None where a tensor is not contiguous: that is looked at each time.
    """
    flat = [t for x in lists for t in x]
    if not all(map(torch.Tensor.is_contiguous, flat)):
        return None
    pointers = map(torch.Tensor.data_ptr, flat)
    sizes = map(torch.Tensor.numel, flat)
    return (*map(len, lists), *pointers, *sizes, *map(_dtype, flat), flat[0].get_device())


def layout_of(lists: Sequence[Tensors], key: Key | None = None) -> Layout:
    """The groups of [params, grads, exp_avgs, exp_avg_sqs, masters or none]; all walk alike."""
    key = key or key_of(lists)
    found = _layouts.get(key) if key else None
    if found is None:
        found = Layout(tuple(_groups(lists)))
        if key:
            _layouts[key] = found
            while len(_layouts) > KEPT:
                _layouts.popitem(last=False)
    elif key:
        _layouts.move_to_end(key)
    return found


def _groups(lists: Sequence[Tensors]) -> list[Group]:
    params, grads, exp_avgs, _, masters = lists
    rows: dict[Kind, list[int]] = {}
    for i, (p, g, m) in enumerate(zip(params, grads, exp_avgs, strict=True)):
        if p.numel():
            rows.setdefault((p.dtype, g.dtype, m.dtype), []).append(i)
    found = []
    for kind, places in rows.items():
        addresses = [
            (*(x[i].data_ptr() if x else 0 for x in lists), params[i].numel()) for i in places
        ]
        found.append(
            Group(
                kind=kind,
                rows=tuple(places),
                addresses=tuple(addresses),
                device=params[0].device,
                masters=bool(masters),
                wide=all(a % 16 == 0 for each in addresses for a in each[:-1]),
            )
        )
    return found
