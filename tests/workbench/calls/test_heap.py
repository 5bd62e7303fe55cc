"""Freed memory stays with a process while its calls are timed, and leaves it afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weft.workbench.calls import heap

COUNT_PAGES = """
import resource
import torch
from weft.workbench.calls import heap

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    outputs = [torch.ones(1 << 20) for _ in range(32)]
    del outputs
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
heap.keep_freed_memory()
first = pages()
# The least of some: the system may take pages back by itself.
later = min(pages() for _ in range(8))
heap.stop_keeping()
print(first, later, pages())
"""


@pytest.mark.skipif(heap._glibc() is None, reason="the C library here is not glibc")
def test_a_call_reuses_the_memory_of_earlier_ones_until_the_timing_ends() -> None:
    run = subprocess.run([sys.executable, "-c", COUNT_PAGES], capture_output=True, text=True, check=True)
    first, later, afterwards = map(int, run.stdout.split())
    # 128 MiB: 32,768 pages of 4 KiB, or fewer and larger ones.
    assert later < first / 4 and later < afterwards / 4, (first, later, afterwards)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        """A library without glibc's functions."""

    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: Other())
    heap._glibc.cache_clear()
    try:
        assert heap._glibc() is None
        heap.keep_freed_memory()
        heap.stop_keeping()
    finally:
        heap._glibc.cache_clear()
