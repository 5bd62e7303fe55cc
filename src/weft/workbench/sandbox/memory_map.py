"""Memory of a worker's outputs: can a read of it run code of the candidate?

A page fault is served by the system alone only in ordinary memory. A candidate could protect the memory of
an output, or register it with ``userfaultfd``, and compute when it is first read, after the clock has
stopped. So this process reads the worker's memory map from the kernel before anything reads the outputs. On
Linux only.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.workbench.calls.guarded_memory import span

PROC = Path("/proc")
PAGE = mmap.PAGESIZE
# Flags of memory whose page faults go to a process: missing pages, protected ones, minor faults.
USERFAULTFD = ("um", "uw", "ui")
_HEADER = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+)", re.MULTILINE)
_FLAGS = re.compile(r"^VmFlags:(.*)$", re.MULTILINE)
_KEY = re.compile(r"^ProtectionKey:\s*([1-9]\d*)$", re.MULTILINE)
# Bound at import, before any candidate's file is loaded.
_mincore = ctypes.CDLL(None).mincore if sys.platform == "linux" else None


class MapHidden(Exception):
    """Raised for a process that hides its memory map."""


@dataclass(frozen=True, kw_only=True)
class MemoryRange:
    """Memory of one output: address and bytes, and how many of its pages are not in memory."""

    address: int
    nbytes: int
    missing: int

    @staticmethod
    def of(tensor: torch.Tensor) -> MemoryRange:
        """Return the range of a strided tensor of this process; nothing of it is read."""
        address = tensor.data_ptr()
        nbytes = span(tuple(tensor.shape), tensor.stride()) * tensor.element_size()
        return MemoryRange(address=address, nbytes=nbytes, missing=_missing_pages(address, nbytes))


def _missing_pages(address: int, nbytes: int) -> int:
    """Count pages that are not in memory; all of them where the system does not say so."""
    first = address // PAGE * PAGE
    n_pages = -(-(address + nbytes - first) // PAGE)
    resident = (ctypes.c_ubyte * n_pages)()
    if _mincore is None or _mincore(ctypes.c_void_p(first), ctypes.c_size_t(n_pages * PAGE), resident):
        return n_pages
    return sum(not byte & 1 for byte in resident)


def read_map(pid: int | None) -> str:
    """Return the memory map of a process with the kernel's flags; '' where it cannot be read.

    Raises :class:`MapHidden` for a process whose map is hidden although its parent's is not: it has made
    itself undumpable.
    """
    try:
        return "" if pid is None else _map_file(pid).read_text()
    except PermissionError as error:
        try:
            # After the last parenthesis: the process's name before it may hold blanks and parentheses.
            parent = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1]
            _map_file(int(parent)).read_text()
        except OSError:
            return ""  # the system shows no process another's map
        raise MapHidden(pid) from error
    except OSError:  # no such file here, or the process has just ended
        return ""


def _map_file(pid: int) -> Path:
    return PROC / str(pid) / "smaps"


def describe_lazy_memory(memory_map: str, ranges: Iterable[MemoryRange]) -> str:
    """Return why a read of one of these ranges could run code of the process; '' if none can.

    Memory of a file or shared with a process is ordinary as long as all of its pages are there: beyond the
    file's end a read sends a signal.
    """
    headers = list(_HEADER.finditer(memory_map))
    starts = [int(header[1], 16) for header in headers]
    ends = [header.start() for header in headers[1:]] + [len(memory_map)]
    for memory in ranges if headers else ():
        address, end = memory.address, memory.address + memory.nbytes
        while address < end:
            index = bisect_right(starts, address) - 1
            region_end = int(headers[index][2], 16) if index >= 0 else 0
            if region_end <= address:
                return "a part of its memory is not mapped"
            header, text = headers[index], memory_map[headers[index].start() : ends[index]]
            if why := _describe_region(header[3], header[4] != "0", text, memory.missing):
                return why
            address = region_end
    return ""


def _describe_region(permissions: str, is_file: bool, text: str, missing: int) -> str:
    if not permissions.startswith("rw"):
        return f"its memory is protected ({permissions})"
    flags = _FLAGS.search(text)
    if flags is not None and any(flag in USERFAULTFD for flag in flags[1].split()):
        return "page faults of its memory are served by a process (userfaultfd)"
    if _KEY.search(text):
        return "its memory has a protection key"
    if (is_file or permissions.endswith("s")) and missing:
        return f"{missing} pages of its memory, which is a file's or shared, are not there"
    return ""
