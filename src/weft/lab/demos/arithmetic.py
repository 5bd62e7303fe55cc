"""Evidence from addresses alone: sectors of a request, degree of bank conflicts, waves of blocks.

Memory moves sectors of 32 bytes (CUDA C++ Best Practices Guide, "Coalesced Access to Global
Memory"); shared memory has 32 banks of 4 bytes. A bank serves one word a cycle, to any number of
threads that load it ("Shared Memory and Memory Banks").
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

SECTOR = 32  # bytes
BANKS, WORD = 32, 4
WARP = 32


def sectors_per_request(addresses: Iterable[int], width: int) -> int:
    """Return the sectors that one load or store of a warp touches: ``width`` bytes at each byte address.

    >>> sectors_per_request(range(0, 128, 4), 4), sectors_per_request(range(0, 4096, 128), 4)
    (4, 32)
    """
    spans = (range(a // SECTOR, (a + width - 1) // SECTOR + 1) for a in addresses)
    return len({sector for span in spans for sector in span})


def conflict_degree(addresses: Iterable[int]) -> int:
    """Return the cycles of a warp's shared-memory access to a 4-byte word at each byte address.

    It is the largest number of different words in one bank; 1 means no conflict.

    >>> conflict_degree(range(0, 128, 4)), conflict_degree(range(0, 4096, 128))
    (1, 32)
    """
    words: dict[int, set[int]] = {}
    for address in addresses:
        word = address // WORD
        words.setdefault(word % BANKS, set()).add(word)
    return max(map(len, words.values()), default=0)


def active_lanes(branches: Sequence[Hashable]) -> float:
    """Return the average number of active threads of a warp, from the branch that each thread takes.

    The branches are equally long and run one after another.

    >>> active_lanes([0, 1] * 16), active_lanes([0] * 32)
    (16.0, 32.0)
    """
    return len(branches) / len(set(branches))


def waves(blocks: int, at_once: int) -> int:
    """Return the rounds in which ``blocks`` run, ``at_once`` of them at a time.

    >>> waves(132, 132), waves(133, 132)
    (1, 2)
    """
    return -(-blocks // at_once)
