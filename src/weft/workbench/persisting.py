"""The part of a GPU's L2 that may be set aside: nobody may hold lines there across a flush.

A process can reserve L2 for accesses marked persisting (``CU_LIMIT_PERSISTING_L2_CACHE_SIZE``), and
what lies there outlives any flush. The driver is asked, since torch has no call for it.
"""

from __future__ import annotations

import ctypes
from functools import cache

from weft.machine import driver

LIMIT = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE in cuda.h


@cache
def _library() -> ctypes.CDLL | None:
    return driver.library()


def reserved() -> int:
    """Bytes of L2 that this process has set aside; 0 where the card has no such thing."""
    library, size = _library(), ctypes.c_size_t()
    if library is None or library.cuCtxGetLimit(ctypes.byref(size), LIMIT):
        return 0
    return size.value


def release() -> None:
    """Set nothing aside, and make the lines that persist ordinary ones."""
    library = _library()
    if library is not None:
        library.cuCtxResetPersistingL2Cache()
        library.cuCtxSetLimit(LIMIT, ctypes.c_size_t(0))
