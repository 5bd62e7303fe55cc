"""A cubin read as the ELF file that it is: each kernel's code, registers, stack, shared memory.

What ``cuobjdump -res-usage`` prints stands in the sections ``.nv.info*`` as attributes: a format
byte, an attribute byte, 16 bits of value or size, and for format 4 the payload. The PTX that a
kernel was assembled from is in ``.nv_debug_ptx_txt`` where it was compiled with line numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from weft.core import WeftError

# Attribute numbers in .nv.info, as cuobjdump names them (EIATTR_*).
MAX_THREADS, REQUIRED_THREADS, FRAME_SIZE, REGISTERS = 0x05, 0x10, 0x11, 0x2F
SIZED = 0x04  # the format whose 16 bits are the payload's size
# From 9.0 on a kernel's shared section opens with what the system keeps of each block's shared
# memory, where the kernel has any: not its own. (sm_80 gives 128 where sm_90 gives 1152.)
KEPT, KEPT_FROM = 1024, 90
EMPTY_TYPE, SYMBOL_TYPE = 8, 2  # ELF: SHT_NOBITS, SHT_SYMTAB


@dataclass(frozen=True, kw_only=True)
class Code:
    """One kernel of a cubin: its instructions' bytes, and what the assembler gave it.

    ``shared`` is the static shared memory and ``stack`` the local memory of a thread, in bytes;
    ``threads`` the block that it was compiled for (exactly, or at most), None where none was told.
    """

    name: str
    text: bytes
    registers: int
    stack: int
    shared: int
    threads: int | None


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    data: bytes
    size: int


def kernels(cubin: bytes, arch: int) -> tuple[Code, ...]:
    """The kernels of a cubin for ``sm_<arch>``; raises :class:`WeftError` where it is none."""
    sections = {s.name: s for s in _sections(cubin)}
    names = _symbols(sections)
    of_all = list(_attributes(sections[".nv.info"].data)) if ".nv.info" in sections else []
    by_symbol: dict[tuple[int, str], int] = {}
    for attribute, payload in of_all:
        if attribute in (REGISTERS, FRAME_SIZE) and len(payload) >= 8:
            symbol, value = struct.unpack_from("<II", payload)
            by_symbol[attribute, names.get(symbol, "")] = value
    found = []
    for section in sections.values():
        name = section.name.removeprefix(".text.")
        info = sections.get(f".nv.info.{name}")
        if name == section.name or info is None:  # a device function that was not inlined has none
            continue
        shared = sections[f".nv.shared.{name}"].size if f".nv.shared.{name}" in sections else 0
        kept = KEPT if arch >= KEPT_FROM and shared >= KEPT else 0
        found.append(
            Code(
                name=name,
                text=section.data,
                registers=by_symbol.get((REGISTERS, name), 0),
                stack=by_symbol.get((FRAME_SIZE, name), 0),
                shared=shared - kept,
                threads=_threads(info.data),
            )
        )
    return tuple(found)


def ptx(cubin: bytes) -> str:
    """The PTX kept in the cubin for its debugger, line by line; empty where none was kept."""
    for section in _sections(cubin):
        if section.name == ".nv_debug_ptx_txt":
            return section.data.replace(b"\0", b"\n").decode(errors="replace")
    return ""


def _sections(cubin: bytes) -> list[_Section]:
    try:
        if cubin[:4] != b"\x7fELF":
            raise ValueError("the first bytes are not an ELF file's")
        (table,) = struct.unpack_from("<Q", cubin, 40)
        step, count, names_at = struct.unpack_from("<HHH", cubin, 58)
        heads = [struct.unpack_from("<IIQQQQ", cubin, table + i * step) for i in range(count)]
        names = heads[names_at][4]
        found = []
        for name, kind, _, _, offset, size in heads:
            ends = cubin.index(b"\0", names + name)
            data = b"" if kind == EMPTY_TYPE else cubin[offset : offset + size]
            found.append(_Section(cubin[names + name : ends].decode(), kind, data, size))
        return found
    except (struct.error, ValueError, IndexError) as error:
        raise WeftError("a cubin", expected="an ELF file of CUDA code", got=str(error)) from error


def _symbols(sections: dict[str, _Section]) -> dict[int, str]:
    """Symbol number -> name."""
    names = sections[".strtab"].data if ".strtab" in sections else b"\0"
    table = next((s.data for s in sections.values() if s.kind == SYMBOL_TYPE), b"")
    found = {}
    for number in range(len(table) // 24):
        (at,) = struct.unpack_from("<I", table, number * 24)
        found[number] = names[at : names.find(b"\0", at)].decode(errors="replace")
    return found


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        shape, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if shape == SIZED:
            yield attribute, data[at : at + value]
            at += value


def _threads(info: bytes) -> int | None:
    sizes = {a: p for a, p in _attributes(info) if a in (MAX_THREADS, REQUIRED_THREADS)}
    payload = sizes.get(REQUIRED_THREADS, sizes.get(MAX_THREADS, b""))
    if len(payload) < 12:
        return None
    x, y, z = struct.unpack_from("<III", payload)
    return int(x * y * z)
