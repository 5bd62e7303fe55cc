"""Races between the programs of a Triton launch, from all their accesses.

Programs of a launch run in any order and at the same time. Two accesses to one element by different programs
are a race if one of them is a plain store, or if one is an atomic and the other a plain load. Atomics do not
race with one another. Elements are compared by the address of their first byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.core.errors import WeftError

LOAD, STORE, ATOMIC = range(3)
KINDS = {"load": LOAD, "store": STORE, "atomic": ATOMIC}
MAX_ACCESSES = 1 << 26  # elements: 2 GiB of records
EXAMINED = 20_000  # racing elements that are examined one by one


@dataclass(kw_only=True)
class DataRace:
    """A pair of lines that race, with one example: an element and two programs.

    ``same_value``: all stores wrote the same bits and no other program read them.
    """

    tensor: str
    offset: int
    first: str  # "store in line 12 by program 0,0,0"
    second: str
    same_value: bool
    elements: int = 0

    @property
    def text(self) -> str:
        note = ", all with the same value" if self.same_value else ""
        return f"{self.tensor}[{self.offset}]: {self.first} and {self.second}{note}"


class Touches:
    """All accesses of a launch: addresses, the program and the line of each, and the stored bits."""

    def __init__(self) -> None:
        self._sites: dict[tuple[str, int, str], int] = {}
        self._columns: list[tuple[np.ndarray, int, int, np.ndarray]] = []
        self._programs: dict[tuple[int, int, int], int] = {}
        self._count = 0

    def add(
        self,
        kind: str,
        line: int,
        tensor: str,
        program: tuple[int, int, int],
        addresses: np.ndarray,
        values: np.ndarray,
    ) -> None:
        self._count += addresses.size
        if self._count > MAX_ACCESSES:
            expected = f"at most {MAX_ACCESSES:,} accessed elements in a launch"
            raise WeftError("races", expected=expected, got="more", hint="choose a smaller --case")
        site = self._sites.setdefault((kind, line, tensor), len(self._sites))
        number = self._programs.setdefault(program, len(self._programs))
        self._columns.append((addresses.ravel(), number, site, _bits(values.ravel())))

    def races(
        self, grid: tuple[int, int, int], tensors: Sequence[tuple[str, int, int, int, int]]
    ) -> list[DataRace]:
        """Return the races; ``tensors`` are (name, address, bytes an element, low, high) of the arguments."""
        if not self._columns:
            return []
        lengths = [len(a) for a, *_ in self._columns]
        address = np.concatenate([a for a, *_ in self._columns])
        program = np.repeat([p for _, p, _, _ in self._columns], lengths)
        site = np.repeat([s for _, _, s, _ in self._columns], lengths)
        bits = np.concatenate([b for *_, b in self._columns])
        if not len(address):
            return []
        kinds = np.array([KINDS[kind] for kind, _, _ in self._sites])
        order = np.argsort(address, kind="stable")
        address, program, site, bits = address[order], program[order], site[order], bits[order]
        kind = kinds[site]
        starts = np.flatnonzero(np.r_[True, address[1:] != address[:-1]])
        several = np.minimum.reduceat(program, starts) != np.maximum.reduceat(program, starts)
        has = [np.logical_or.reduceat(kind == k, starts) for k in (LOAD, STORE, ATOMIC)]
        racing = np.flatnonzero(several & (has[STORE] | (has[ATOMIC] & has[LOAD])))
        ends = np.r_[starts[1:], len(address)]
        races: dict[tuple[int, int], DataRace] = {}
        for group in racing[:EXAMINED]:
            at = np.arange(starts[group], ends[group])
            first, second = _pair(kind[at], program[at])
            key = (int(site[at[first]]), int(site[at[second]]))
            if key not in races:
                stores = at[kind[at] == STORE]
                same = len(stores) == len(at) and len(set(bits[stores].tolist())) == 1
                races[key] = self._data_race(
                    address[at[0]], [(site[at[i]], program[at[i]]) for i in (first, second)], same, tensors
                )
            races[key].elements += 1
        return list(races.values())

    def _data_race(
        self,
        address: int,
        pair: Sequence[tuple[int, int]],
        same: bool,
        tensors: Sequence[tuple[str, int, int, int, int]],
    ) -> DataRace:
        sites, programs = list(self._sites), list(self._programs)
        texts = []
        for site, program in pair:
            kind, line, _ = sites[site]
            texts.append(f"{kind} in line {line} by program {','.join(map(str, programs[program]))}")
        name, offset = sites[pair[0][0]][2], int(address)
        for tensor, base, itemsize, low, high in tensors:
            if tensor == name and low <= (int(address) - base) // itemsize < high:
                offset = (int(address) - base) // itemsize
        return DataRace(tensor=name, offset=offset, first=texts[0], second=texts[1], same_value=same)


def _pair(kind: np.ndarray, program: np.ndarray) -> tuple[int, int]:
    """Return two accesses to one element that race: a store (or else an atomic), and another program's."""
    stores = np.flatnonzero(kind == STORE)
    if len(stores):
        first = int(stores[0])
        return first, int(np.flatnonzero(program != program[first])[0])
    for first in np.flatnonzero(kind == ATOMIC):
        other = np.flatnonzero((program != program[first]) & (kind == LOAD))
        if len(other):
            return int(first), int(other[0])
    raise AssertionError("no pair of accesses races")


def _bits(values: np.ndarray) -> np.ndarray:
    """Return the bits of values as integers of 8 bytes, so that NaN equals itself."""
    flat = np.ascontiguousarray(values)
    if flat.dtype == bool:
        flat = flat.astype(np.uint8)
    return flat.view(f"u{flat.dtype.itemsize}").astype(np.uint64)
