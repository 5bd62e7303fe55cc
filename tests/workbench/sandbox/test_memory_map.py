"""Memory whose page faults could run a candidate's code is told from ordinary memory by the kernel's map."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weft.workbench.sandbox import memory_map
from weft.workbench.sandbox.memory_map import MemoryRange, describe_lazy_memory, read_map

PAGE = memory_map.PAGE
NBYTES = 4 * PAGE
SMAPS = """\
10000-14000 rw-p 00000000 00:00 0                    [heap]
Rss:                  16 kB
{key}
VmFlags: rd wr mr mw me ac {flags}
14000-18000 {permissions} 00000000 00:01 {inode}                    /memfd:x (deleted)
Rss:                   4 kB
VmFlags: rd wr sh mr mw me ms
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="the map and its flags are Linux's")


def described(
    address: int = 0x10000,
    nbytes: int = 0x4000,
    missing: int = 0,
    *,
    key: str = "Swap: 0 kB",
    flags: str = "sd",
    permissions: str = "rw-p",
    inode: int = 0,
) -> str:
    text = SMAPS.format(key=key, flags=flags, permissions=permissions, inode=inode)
    return describe_lazy_memory(text, [MemoryRange(address=address, nbytes=nbytes, missing=missing)])


def test_ordinary_memory_is_accepted_also_across_two_regions_and_where_pages_were_never_touched() -> None:
    assert described() == described(nbytes=0x8000) == described(missing=4) == described(nbytes=0) == ""


@pytest.mark.parametrize("flag", ["um", "uw", "ui"])
def test_memory_that_is_registered_with_userfaultfd_is_refused(flag: str) -> None:
    assert "userfaultfd" in described(flags=flag)


@pytest.mark.parametrize("permissions", ["---p", "r--p", "-w-p"])
def test_protected_memory_is_refused_also_at_the_end_of_an_output(permissions: str) -> None:
    assert described(permissions=permissions) == ""
    assert permissions in described(0x13000, 0x2000, permissions=permissions)


def test_a_protection_key_is_refused_and_the_key_of_all_memory_is_not() -> None:
    assert described(key="ProtectionKey:         0") == ""
    assert "protection key" in described(key="ProtectionKey:         3")


@pytest.mark.parametrize(("permissions", "inode"), [("rw-s", 0), ("rw-s", 7), ("rw-p", 7)])
def test_shared_memory_and_files_are_accepted_while_all_pages_are_there(permissions: str, inode: int) -> None:
    at_a_file = {"address": 0x14000, "permissions": permissions, "inode": inode}
    assert described(**at_a_file) == ""  # type: ignore[arg-type]
    assert "not there" in described(missing=1, **at_a_file)  # type: ignore[arg-type]


def test_an_address_outside_of_the_map_is_refused_and_no_map_says_nothing() -> None:
    assert "not mapped" in described(0x9000) and "not mapped" in described(0x17000, 0x2000)
    assert describe_lazy_memory("", [MemoryRange(address=1, nbytes=1, missing=0)]) == ""
    assert read_map(None) == "" == read_map(2**30)


@pytest.fixture
def memory() -> Iterator[torch.Tensor]:
    """Tensor of a few whole pages of its own."""
    yield torch.frombuffer(
        mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    )


@linux
def test_the_kernels_map_shows_protection_and_freed_pages_of_real_memory(memory: torch.Tensor) -> None:
    def look() -> str:
        return describe_lazy_memory(read_map(os.getpid()), [MemoryRange.of(memory)])

    assert look() == ""  # no page was touched
    memory.fill_(1)
    assert look() == "" and MemoryRange.of(memory).missing == 0
    libc, at = ctypes.CDLL(None), ctypes.c_void_p(memory.data_ptr())
    libc.mprotect(at, ctypes.c_size_t(NBYTES), 0)
    assert "protected" in look()
    libc.mprotect(at, ctypes.c_size_t(NBYTES), 3)
    assert look() == ""


@linux
def test_a_shortened_file_shows_and_a_whole_one_does_not(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(NBYTES)
        memory = torch.frombuffer(mmap.mmap(file.fileno(), NBYTES), dtype=torch.uint8)
        memory.fill_(1)
        assert describe_lazy_memory(read_map(os.getpid()), [MemoryRange.of(memory)]) == ""
        file.truncate(0)  # a read of the memory would raise a signal
        assert "not there" in describe_lazy_memory(read_map(os.getpid()), [MemoryRange.of(memory)])
        file.truncate(NBYTES)


@linux
def test_outputs_of_torch_lie_in_ordinary_memory_whatever_their_layout() -> None:
    base = torch.randn(64, 1030)
    outputs = [base, base.t(), base[:, 3:7], base[0].expand(5, 1030), torch.zeros(1 << 20), torch.zeros(())]
    assert describe_lazy_memory(read_map(os.getpid()), map(MemoryRange.of, outputs)) == ""
    shared = MemoryRange.of(base.share_memory_())
    assert describe_lazy_memory(read_map(os.getpid()), [shared]) == ""


@pytest.mark.parametrize("hides_parent", [False, True])
def test_a_map_is_hidden_by_its_process_only_if_its_parents_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hides_parent: bool
) -> None:
    for pid in ("7", "8"):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "smaps").write_text(f"map of {pid}")
    (tmp_path / "7" / "stat").write_text("7 (a name) with 1 2) S 8 7 7")
    real = Path.read_text

    def read_text(self: Path) -> str:
        if self.name == "smaps" and (hides_parent or self.parent.name == "7"):
            raise PermissionError
        return real(self)

    monkeypatch.setattr(memory_map, "PROC", tmp_path)
    monkeypatch.setattr(Path, "read_text", read_text)
    if hides_parent:
        assert read_map(7) == ""
    else:
        with pytest.raises(memory_map.MapHidden):
            read_map(7)
