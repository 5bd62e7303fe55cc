"""Facts of a kernel as text, one a line, for tables, pages and comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.workbench.explain.inspect.kernel import Kernel
from weft.workbench.report.scales import digits

NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Fact of the kernels on both sides of a comparison."""

    fact: str
    left: tuple[str, ...]
    right: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return set(self.left) != set(self.right)


def facts(kernel: Kernel) -> dict[str, str]:
    """Return the facts of a kernel by name; every kernel has the same names in the same order."""
    counts = kernel.counts
    memory = {name: widths(by_width) for name, by_width in counts.memory.items()}
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
        "elements a thread": elements(kernel),
        "occupancy": occupied(kernel),
        "global loads": memory.get("global loads", NONE),
        "global stores": memory.get("global stores", NONE),
        "generic loads and stores": _with_variant(memory, "generic loads", "generic stores"),
        "asynchronous copies": memory.get("async copies", NONE),
        "TMA and bulk copies": times(counts.bulk),
        "tensor cores": times(counts.tensor),
        "tensor memory": times(counts.tensor_memory),
        "shared loads": _with_variant(memory, "shared loads", "shared matrix loads"),
        "shared stores": _with_variant(memory, "shared stores", "shared matrix stores"),
        "barriers": times(counts.barriers),
        "atomics": times(counts.atomics),
        "shuffles and votes": times(counts.shuffles),
        "fast approximations": times({k.removeprefix("MUFU."): n for k, n in counts.fast_math.items()}),
        "branches": f"{counts.branches}" + (f", {counts.calls} calls" if counts.calls else ""),
        "instructions": str(counts.instructions),
    }


def _with_variant(memory: Mapping[str, str], kind: str, variant: str) -> str:
    """Format a kind of access and its variant as one fact."""
    label = variant.removeprefix("shared ").removeprefix("generic ")
    parts = [memory[kind]] if kind in memory else []
    parts += [f"{memory[variant]} ({label})"] if variant in memory else []
    return ", ".join(parts) or NONE


def widths(by_width: Mapping[str, int]) -> str:
    """Format counts by width, the widest first.

    >>> widths({"32": 1, "128": 4})
    '4 of 128 bits, 1 of 32 bits'
    """
    order = sorted(by_width.items(), key=lambda item: -int(item[0]))
    return ", ".join(f"{n} of {bits} bits" for bits, n in order) or NONE


def times(tally: Mapping[str, int]) -> str:
    """Format counts by name, the most frequent first.

    >>> times({"EX2": 5, "RCP": 1})
    '5 EX2, 1 RCP'
    """
    order = sorted(tally.items(), key=lambda item: -item[1])
    return ", ".join(f"{n} {name}" for name, n in order) or NONE


def size(nbytes: int) -> str:
    """Format a size in bytes, or in KiB from 10 KiB on.

    >>> size(128), size(50688)
    ('128 B', '49.5 KiB')
    """
    return f"{nbytes} B" if nbytes < 10240 else f"{nbytes / 1024:.4g} KiB"


def spills(kernel: Kernel) -> str:
    """Format the bytes that are spilled from registers."""
    spilled = kernel.spills
    if spilled is None:
        return "unknown"
    return f"{spilled[0]} B stored, {spilled[1]} B loaded" if any(spilled) else NONE


def elements(kernel: Kernel) -> str:
    """Format the elements of the outputs for each thread, or the threads for each element."""
    share = kernel.elements_a_thread
    if share is None:
        return "unknown"
    if share.exact:
        return f"{share.mean:.0f} (exact)"
    if share.launches > 1:
        reason = f"{share.launches} launches share the call"
    else:
        reason = "a tail, or threads that work together"
    if share.mean >= 1:
        return f"about {digits(share.mean)} (estimated: {reason})"
    return f"1 for about {digits(1 / share.mean)} threads (estimated: {reason})"


def occupied(kernel: Kernel) -> str:
    """Format the theoretical occupancy and its limit."""
    occupied = kernel.occupancy
    if occupied is None:
        return "unknown"
    limit = " and ".join(occupied.limits)
    blocks = f"{occupied.blocks} block{'s'[: occupied.blocks != 1]} an SM"
    return f"{occupied.share:.0%}: {blocks}, limited by {limit}"


def compare(left: Sequence[Kernel], right: Sequence[Kernel]) -> list[Difference]:
    """Return the facts of two implementations' kernels side by side."""
    left_facts, right_facts = ([{"kernel": k.name, **facts(k)} for k in side] for side in (left, right))
    names: list[str] = list(left_facts[0])
    return [
        Difference(
            fact=name,
            left=tuple(kernel[name] for kernel in left_facts),
            right=tuple(kernel[name] for kernel in right_facts),
        )
        for name in names
    ]


def comparison_json(
    left: Sequence[Kernel], right: Sequence[Kernel], case: str, direction: str
) -> dict[str, Any]:
    """Return a comparison as plain data."""
    return {
        "case": case,
        "direction": direction,
        "left": [k.to_json() for k in left],
        "right": [k.to_json() for k in right],
        "differs": [d.fact for d in compare(left, right) if d.differs],
    }
