"""A chain of operators: which tensors the kernels of each implementation read and write, and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Of float32. A row is short enough that a program of torch.compile has it in registers and reads it once.
ROWS, COLUMNS, ITEM = 1 << 18, 1024, 4
SHARE_OF_MEMORY = 64  # one tensor is at most this part of the GPU's memory
EAGER, COMPILED, FUSED = "eager", "torch.compile", "Weft"


@dataclass(frozen=True)
class Step:
    """One kernel: its name, and the names of the tensors that it reads and writes, separated by spaces."""

    kernel: str
    reads: str
    writes: str

    def __str__(self) -> str:
        return f"{self.kernel}: read {', '.join(self.reads.split())}; write {', '.join(self.writes.split())}"


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A chain of operators: its kernels in each implementation, the calls, and the float64 reference.

    ``inputs`` names the tensors of a call: ``rows`` x ``COLUMNS``, or ``COLUMNS`` elements for a vector.
    ``reference(inputs, mask)`` gets a part of the rows, and a dropout's mask of them (None without).
    """

    inputs: tuple[str, ...]
    steps: Mapping[str, tuple[Step, ...]]
    calls: Callable[[str], Callable[..., torch.Tensor]]
    reference: Callable[..., torch.Tensor]
    dropout: bool = False
    tolerance: float = 1e-4  # values up to 6, sums of 1024 in float32

    def nbytes(self, implementation: str, rows: int = ROWS) -> int:
        """Return the predicted bytes of a call: each kernel reads and writes each of its tensors once."""
        steps = self.steps[implementation]
        return sum(tensor_bytes(name, rows) for s in steps for name in f"{s.reads} {s.writes}".split())

    def prediction(self, rows: int = ROWS) -> list[dict[str, Any]]:
        """Return for each implementation its kernels, its bytes, and these in tensors of rows x COLUMNS."""
        entries = []
        for name, steps in self.steps.items():
            nbytes = self.nbytes(name, rows)
            accesses = nbytes / tensor_bytes("x", rows)
            entries.append(
                {"name": name, "steps": [str(s) for s in steps], "bytes": nbytes, "accesses": accesses}
            )
        return entries


def tensor_bytes(name: str, rows: int) -> int:
    """Return the size of a chain's tensor by its name, in bytes.

    >>> tensor_bytes("x", 2), tensor_bytes("mask", 2), tensor_bytes("bias", 2), tensor_bytes("mean", 2)
    (8192, 2048, 4096, 8)
    """
    if name in ("bias", "weight"):
        return COLUMNS * ITEM
    if name in ("mean", "rstd"):
        return rows * ITEM
    return rows * COLUMNS * (1 if name == "mask" else ITEM)


def rows_that_fit(memory: int) -> int:
    """Return the rows of a tensor on a GPU with so many bytes: a power of two, at most ``ROWS``.

    >>> rows_that_fit(141 << 30), rows_that_fit(16 << 30)
    (262144, 65536)
    """
    most = memory // (SHARE_OF_MEMORY * COLUMNS * ITEM)
    return min(ROWS, 1 << max(0, most.bit_length() - 1))
