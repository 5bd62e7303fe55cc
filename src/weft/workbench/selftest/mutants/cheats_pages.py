"""Cheats with page faults: outputs in memory that is protected until it is read, and computed then.

Each is honest in its check. Once it is timed, it copies its inputs, protects the memory of its output and
returns. The first access raises a signal, whose handler computes.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft.workbench.selftest.mutants.cheats_samples import LARGE
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, blank, honest, plant

ADDRESS_AT = 16  # bytes into ``siginfo_t``: the address of the access
READABLE, WRITABLE = 1, 2  # of mprotect
SA_SIGINFO = 4
Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class SignalAction(ctypes.Structure):
    """``struct sigaction`` of glibc."""

    _fields_ = (
        ("handler", Handler),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class ProtectedMemory:
    """Outputs whose memory is protected until the first access; ``compute`` of each writes it then."""

    def __init__(self) -> None:
        self.pending: dict[int, tuple[int, Callable[[], object]]] = {}  # bytes and work, by address
        self.libc = ctypes.CDLL(None)
        self.action = SignalAction(handler=Handler(self._on_access), flags=SA_SIGINFO)  # kept alive
        self.libc.sigaction(int(signal.SIGSEGV), ctypes.byref(self.action), None)

    def _protect(self, address: int, nbytes: int, permissions: int) -> None:
        self.libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), permissions)

    def _on_access(self, number: int, info: int, context: int) -> None:
        address = ctypes.c_size_t.from_address(info + ADDRESS_AT).value
        for start, (nbytes, compute) in list(self.pending.items()):
            if start <= address < start + nbytes:
                del self.pending[start]
                self._protect(start, nbytes, READABLE | WRITABLE)
                compute()
                return
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)

    def output(self, like: torch.Tensor, compute: Callable[[torch.Tensor], object]) -> torch.Tensor:
        """Return an output of this form, which ``compute`` writes when it is first read or written."""
        memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        y = torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
        self.pending[y.data_ptr()] = len(memory), lambda: compute(y)
        self._protect(y.data_ptr(), len(memory), 0)
        return y


def _protected(operator: str) -> Callable[[], Forward]:
    def make() -> Forward:
        memory: list[ProtectedMemory] = []

        def forward(*x: torch.Tensor, **params: Any) -> Any:
            # The check puts its inputs between guard bands, which make the storage larger than the tensor.
            if x[0].untyped_storage().nbytes() != x[0].nbytes or x[0].numel() < LARGE:
                return honest(operator)(*x, **params)
            memory[:] = memory or [ProtectedMemory()]
            copies = [t.clone() for t in x]  # they change before the output is read
            return memory[0].output(
                blank(operator, *x), lambda y: y.copy_(honest(operator)(*copies, **params))
            )

        return forward

    return make


def _mutants() -> Iterator[Mutant]:
    for operator in ("gelu", "matmul"):
        yield plant(
            f"C24/{operator}/eager/protected",
            "an output that is computed when its memory is first read",
            "outputs",
            _protected(operator),
            phase="bench",
            devices=("cpu",),
            not_here="page faults of a GPU's memory are served by its driver",
        )


MUTANTS = tuple(_mutants())
