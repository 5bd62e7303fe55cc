"""Reader of cubins, which are ELF files: code, registers, stack and shared memory of each kernel.

The values that ``cuobjdump -res-usage`` prints are attributes in the sections ``.nv.info*``: a format byte,
an attribute byte, 16 bits of value or size, and for format 4 a payload. The PTX is in
``.nv_debug_ptx_txt`` if the kernel was compiled with line numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from weft.core import WeftError

# Attribute numbers in .nv.info, as cuobjdump names them (EIATTR_*).
MAX_THREADS, REQUIRED_THREADS, FRAME_SIZE, REGISTERS = 0x05, 0x10, 0x11, 0x2F
SIZED = 0x04  # the format whose 16 bits are the payload's size
# From 9.0 on the section of a kernel with shared memory includes the bytes that the system reserves for
# each block, which are not the kernel's own (sm_80 reports 128 where sm_90 reports 1152).
RESERVED, RESERVED_FROM = 1024, 90
EMPTY_TYPE, SYMBOL_TYPE = 8, 2  # ELF: SHT_NOBITS, SHT_SYMTAB


@dataclass(frozen=True, kw_only=True)
class Code:
    """A kernel of a cubin: its instructions and the resources that the assembler assigned.

    ``shared`` is the static shared memory and ``stack`` the local memory of a thread, in bytes. ``threads``
    is the block size it was compiled for (exact or maximal), or None if none was declared.
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
    """Return the kernels of a cubin for ``sm_<arch>``. Raise :class:`WeftError` if it is no cubin."""
    sections = {s.name: s for s in _sections(cubin)}
    names = _symbols(sections)
    attributes = list(_attributes(sections[".nv.info"].data)) if ".nv.info" in sections else []
    by_symbol: dict[tuple[int, str], int] = {}
    for attribute, payload in attributes:
        if attribute in (REGISTERS, FRAME_SIZE) and len(payload) >= 8:
            symbol, value = struct.unpack_from("<II", payload)
            by_symbol[attribute, names.get(symbol, "")] = value
    kernels = []
    # One .text section for each kernel.
    for section in sections.values():
        name = section.name.removeprefix(".text.")
        info = sections.get(f".nv.info.{name}")
        if name == section.name or info is None:  # a device function that was not inlined has no info
            continue
        shared = sections[f".nv.shared.{name}"].size if f".nv.shared.{name}" in sections else 0
        reserved = RESERVED if arch >= RESERVED_FROM and shared >= RESERVED else 0
        kernels.append(
            Code(
                name=name,
                text=section.data,
                registers=by_symbol.get((REGISTERS, name), 0),
                stack=by_symbol.get((FRAME_SIZE, name), 0),
                shared=shared - reserved,
                threads=_threads(info.data),
            )
        )
    return tuple(kernels)


def ptx(cubin: bytes) -> str:
    """Return the PTX that the cubin holds for debuggers; empty if it holds none."""
    for section in _sections(cubin):
        if section.name == ".nv_debug_ptx_txt":
            return section.data.replace(b"\0", b"\n").decode(errors="replace")
    return ""


def _sections(cubin: bytes) -> list[_Section]:
    try:
        if cubin[:4] != b"\x7fELF":
            raise ValueError("the first bytes are not an ELF file's")
        # Offsets of the ELF64 header: e_shoff at 40; e_shentsize, e_shnum and e_shstrndx at 58.
        (table,) = struct.unpack_from("<Q", cubin, 40)
        step, count, names_at = struct.unpack_from("<HHH", cubin, 58)
        heads = [struct.unpack_from("<IIQQQQ", cubin, table + i * step) for i in range(count)]
        names = heads[names_at][4]
        sections = []
        for name, kind, _, _, offset, size in heads:
            ends = cubin.index(b"\0", names + name)
            data = b"" if kind == EMPTY_TYPE else cubin[offset : offset + size]
            sections.append(_Section(cubin[names + name : ends].decode(), kind, data, size))
        return sections
    except (struct.error, ValueError, IndexError) as error:
        raise WeftError("a cubin", expected="an ELF file of CUDA code", got=str(error)) from error


def _symbols(sections: dict[str, _Section]) -> dict[int, str]:
    """Map symbol numbers to names."""
    names = sections[".strtab"].data if ".strtab" in sections else b"\0"
    table = next((s.data for s in sections.values() if s.kind == SYMBOL_TYPE), b"")
    symbols = {}
    for number in range(len(table) // 24):
        # An Elf64_Sym has 24 bytes, and its first four are the name's offset.
        (at,) = struct.unpack_from("<I", table, number * 24)
        symbols[number] = names[at : names.find(b"\0", at)].decode(errors="replace")
    return symbols


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
    # An exact size (Triton) says more than an upper bound (__launch_bounds__).
    payload = sizes.get(REQUIRED_THREADS, sizes.get(MAX_THREADS, b""))
    if len(payload) < 12:
        return None
    x, y, z = struct.unpack_from("<III", payload)
    return int(x * y * z)
