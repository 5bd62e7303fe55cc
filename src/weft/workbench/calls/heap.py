"""Memory that calls on a CPU free: it stays with the process while calls are timed.

glibc returns memory to the system when much of it is free at the end of the heap, and fetches it again
page by page. Chance decides which calls fetch pages, and on a virtual machine those can take over ten times
as long as the others (docs/log.md, 2026-11-23). A time must be repeatable. So a call reuses the memory of
earlier calls, as it does on a GPU, where torch's allocator keeps it. Allocations above 32 MiB come from the
system each time, with or without this.

Where the C library is not glibc (macOS, Windows, musl) nothing changes.
"""

from __future__ import annotations

import ctypes
from functools import cache

# Of malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_THRESHOLD = 32 << 20  # the largest that glibc takes, and the one that it raises its own to
NEVER = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Keep all freed memory in this process, for allocations of up to 32 MiB."""
    if (libc := _glibc()) is not None:
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)


def stop_keeping() -> None:
    """Undo :func:`keep_freed_memory`: give memory back now, and when 64 MiB are free at the heap's end."""
    if (libc := _glibc()) is not None:
        libc.mallopt(M_TRIM_THRESHOLD, 2 * MMAP_THRESHOLD)  # as glibc sets it beside its own threshold
    trim()


def trim() -> None:
    """Give the memory that is free now back to the system."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(ctypes.c_size_t(0))


@cache
def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        _ = libc.gnu_get_libc_version, libc.mallopt, libc.malloc_trim
    except (AttributeError, OSError, TypeError):  # TypeError: Windows takes no None
        return None
    return libc
