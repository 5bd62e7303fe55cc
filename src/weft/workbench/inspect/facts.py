"""A kernel's numbers in words, one fact a line: what tables, pages and comparisons show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.workbench.inspect.kernel import Kernel

NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One fact of the kernels on both sides, and whether the sides tell the same."""

    fact: str
    left: tuple[str, ...]
    right: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return set(self.left) != set(self.right)


def facts(kernel: Kernel) -> dict[str, str]:
    """Name -> what is told; the same names for every kernel, in the same order."""
    counts = kernel.counts
    memory = {name: widths(by) for name, by in counts.memory.items()}
    grid = "unknown" if kernel.cases else "no case launches it"
    if kernel.launch:
        grid = f"{'x'.join(map(str, kernel.launch.grid))} blocks at {kernel.cases[0]}"
    return {
        "registers": f"{kernel.code.registers} a thread",
        "spills": spills(kernel),
        "stack": f"{kernel.code.stack} B a thread",
        "shared memory, static": size(kernel.code.shared),
        "shared memory, dynamic": "unknown" if kernel.dynamic is None else size(kernel.dynamic),
        "block": f"{kernel.threads} threads" if kernel.threads else "unknown",
        "grid": grid,
        "occupancy": occupied(kernel),
        "global loads": memory.get("global loads", NONE),
        "global stores": memory.get("global stores", NONE),
        "generic loads and stores": _both(memory, "generic loads", "generic stores"),
        "asynchronous copies": memory.get("async copies", NONE),
        "TMA and bulk copies": times(counts.bulk),
        "tensor cores": times(counts.tensor),
        "tensor memory": times(counts.tensor_memory),
        "shared loads": _both(memory, "shared loads", "shared matrix loads"),
        "shared stores": _both(memory, "shared stores", "shared matrix stores"),
        "barriers": times(counts.barriers),
        "atomics": times(counts.atomics),
        "shuffles and votes": times(counts.shuffles),
        "fast approximations": times({k.removeprefix("MUFU."): n for k, n in _fast(kernel)}),
        "branches": f"{counts.branches}" + (f", {counts.calls} calls" if counts.calls else ""),
        "instructions": str(counts.instructions),
    }


def _fast(kernel: Kernel) -> Sequence[tuple[str, int]]:
    return list(kernel.counts.fast_math.items())


def _both(memory: Mapping[str, str], plain: str, matrix: str) -> str:
    """A kind of access and its variant, told as one fact."""
    extra = matrix.removeprefix("shared ").removeprefix("generic ")
    found = [memory[plain]] if plain in memory else []
    found += [f"{memory[matrix]} ({extra})"] if matrix in memory else []
    return ", ".join(found) or NONE


def widths(by_width: Mapping[str, int]) -> str:
    """Counts by width, the widest first.

    >>> widths({"32": 1, "128": 4})
    '4 of 128 bits, 1 of 32 bits'
    """
    order = sorted(by_width.items(), key=lambda item: -int(item[0]))
    return ", ".join(f"{n} of {bits} bits" for bits, n in order) or NONE


def times(tally: Mapping[str, int]) -> str:
    """Counts by name, the most frequent first.

    >>> times({"EX2": 5, "RCP": 1})
    '5 EX2, 1 RCP'
    """
    order = sorted(tally.items(), key=lambda item: -item[1])
    return ", ".join(f"{n} {name}" for name, n in order) or NONE


def size(nbytes: int) -> str:
    """Bytes, and the same in KiB where that is shorter to read.

    >>> size(128), size(50688)
    ('128 B', '49.5 KiB')
    """
    return f"{nbytes} B" if nbytes < 10240 else f"{nbytes / 1024:.4g} KiB"


def spills(kernel: Kernel) -> str:
    """What too few registers make it store and load."""
    moved = kernel.spills
    if moved is None:
        return "unknown"
    return f"{moved[0]} B stored, {moved[1]} B loaded" if any(moved) else NONE


def occupied(kernel: Kernel) -> str:
    """The theoretical occupancy and what limits it."""
    full = kernel.occupancy
    if full is None:
        return "unknown"
    limit = " and ".join(full.limits)
    told = f"{full.blocks} block{'s'[: full.blocks != 1]} a multiprocessor, limited by {limit}"
    return f"{full.share:.0%}: {told}"


def compare(left: Sequence[Kernel], right: Sequence[Kernel]) -> list[Difference]:
    """The facts of two implementations' kernels side by side."""
    told = [[{"kernel": k.name, **facts(k)} for k in side] for side in (left, right)]
    names: list[str] = list(told[0][0])
    return [
        Difference(
            fact=name,
            left=tuple(one[name] for one in told[0]),
            right=tuple(one[name] for one in told[1]),
        )
        for name in names
    ]


def compared_json(
    left: Sequence[Kernel], right: Sequence[Kernel], at: str, direction: str
) -> dict[str, Any]:
    """A comparison as plain data."""
    return {
        "case": at,
        "direction": direction,
        "left": [k.to_json() for k in left],
        "right": [k.to_json() for k in right],
        "differs": [d.fact for d in compare(left, right) if d.differs],
    }
