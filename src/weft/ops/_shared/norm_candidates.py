"""The norms' configurations that are worth timing: what a sweep on a device goes through."""

from __future__ import annotations

from dataclasses import replace

from weft.ops._shared.norm_configs import Block, Kind, Stay, Walk, block, stay, walk


def candidates(columns: int, kind: Kind, room: int) -> list[Block | Walk]:
    """The forward configurations worth timing for rows of ``columns``, moved 16 bytes at a time on
    a device with clusters."""
    accesses = columns // kind.access
    if accesses <= 256:  # vectors, cluster, rows, early, stream
        ways = [(2, 1, 1, 1, 0), (2, 1, 1, 1, 1), (2, 1, 2, 1, 0), (1, 1, 1, 1, 0), (1, 1, 2, 1, 0)]
        ways += [(3, 1, 1, 1, 0), (3, 1, 2, 1, 0), (4, 1, 1, 1, 0), (4, 1, 2, 1, 0)]
    elif accesses <= 4096:
        ways = [(4, 1, 1, 0, 0), (4, 1, 1, 1, 0), (2, 1, 1, 0, 0), (2, 1, 1, 1, 0), (4, 1, 2, 0, 0)]
    else:
        ways = [(8, 4, 1, 0, 0), (8, 4, 1, 0, 1)]
    found: list[Block | Walk] = []
    for vectors, cluster, rows, early, stream in ways:
        one = block(
            columns, kind, vectors, cluster=cluster, rows=rows, early=bool(early),
            stream=bool(stream),
        )  # fmt: skip
        if one and (one.full or not early) and (cluster == 1 or room) and one not in found:
            found.append(one)
    if accesses <= 4096 and found and isinstance(found[0], Block):
        found.append(replace(found[0], full=False))
    return [*found, *_walks(columns, kind)] if room else found


def _walks(columns: int, kind: Kind) -> list[Block | Walk]:
    """Rows at a time above all: few begin often, many end at unlike times."""
    accesses = columns // kind.access
    if accesses < 1024:
        return []
    if accesses <= 4096:  # vectors, cluster, rows, resident
        ways = [(4, 2, 16, 4), (4, 1, 16, 2), (2, 2, 16, 2), (4, 2, 64, 4)]
    else:
        ways = [(4, 8, 8, 4), (4, 8, 16, 4), (4, 8, 4, 4), (4, 8, 64, 4), (2, 8, 8, 2)]
        ways += [(8, 4, 8, 2), (8, 8, 8, 5), (4, 8, 8, 3), (4, 4, 8, 2)]
    made = (walk(columns, kind, v, cluster=c, rows=n, resident=k) for v, c, n, k in ways)
    return [one for one in made if one]


def candidates_backward(columns: int, kind: Kind, room: int) -> list[Stay]:
    """The backward configurations worth timing, as :func:`candidates`: shallow rings above all,
    since what is under way when the last row has been asked for is waited for."""
    ways = [(512, 4, 3), (512, 4, 2), (512, 2, 3), (512, 2, 2), (384, 4, 3), (384, 2, 3)]
    ways += [(640, 2, 3), (768, 1, 4), (640, 4, 2), (256, 4, 3)]
    found: list[Stay] = []
    for threads, vectors, stages in ways:
        for cluster in (1, 2, 4, 8):
            one = stay(
                columns, kind, room, threads=threads, vectors=vectors, cluster=cluster,
                resident=2 if threads == 256 else 1, stages=stages,
            )  # fmt: skip
            if one:
                found += [one] if one not in found else []
                break
    return found
