"""What addresses alone tell: sectors a request touches, how deep banks conflict, blocks in waves.

Memory moves sectors of 32 bytes (CUDA C++ Best Practices Guide, "Coalesced Access to Global
Memory"); shared memory has 32 banks of 4 bytes, each of which serves one word a cycle, to as many
threads as ask for it ("Shared Memory and Memory Banks").
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

SECTOR = 32  # bytes
BANKS, WORD = 32, 4
WARP = 32


def sectors_per_request(addresses: Iterable[int], width: int) -> int:
    """Sectors that one load or store of a warp touches: ``width`` bytes at each byte address.

    >>> sectors_per_request(range(0, 128, 4), 4), sectors_per_request(range(0, 4096, 128), 4)
    (4, 32)
    """
    spans = (range(a // SECTOR, (a + width - 1) // SECTOR + 1) for a in addresses)
    return len({sector for span in spans for sector in span})


def conflict_degree(addresses: Iterable[int]) -> int:
    """Cycles that shared memory needs for a warp's access of a 4-byte word at each byte address:
    the most different words that one bank is asked for; 1 is no conflict.

    >>> conflict_degree(range(0, 128, 4)), conflict_degree(range(0, 4096, 128))
    (1, 32)
    """
    words: dict[int, set[int]] = {}
    for address in addresses:
        word = address // WORD
        words.setdefault(word % BANKS, set()).add(word)
    return max(map(len, words.values()), default=0)


def lanes_together(ways: Sequence[Hashable]) -> float:
    """Threads of a warp that take part in an instruction, on average, where each goes one of
    several equally long ways that are walked one after another.

    >>> lanes_together([0, 1] * 16), lanes_together([0] * 32)
    (16.0, 32.0)
    """
    return len(ways) / len(set(ways))


def waves(blocks: int, at_once: int) -> int:
    """Rounds in which ``blocks`` run, ``at_once`` of them at a time.

    >>> waves(132, 132), waves(133, 132)
    (1, 2)
    """
    return -(-blocks // at_once)
