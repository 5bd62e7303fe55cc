"""The norms' configurations that are worth timing: what a sweep on a device goes through."""

from __future__ import annotations

from dataclasses import replace

from weft.ops._shared.norm_configs import Stay, leans, stay
from weft.ops._shared.norm_walks import Block, Kind, Walk, block, walk


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
    return [*found, *_walks(columns, kind, room)] if room else found


# Walks of rows past 4096 accesses: vectors, threads, rows, resident, stages, held. Few rows begin
# often and are shared out evenly, many read weights once; a row alone comes and goes.
WALKS = ((4, 256, 8, 4, 0, 0), (4, 256, 4, 4, 0, 0), (8, 128, 8, 5, 0, 0))
FLOWS = {
    False: (
        (8, 256, 1, 3, 1, 1), (8, 256, 1, 2, 1, 1), (8, 256, 1, 3, 1, 0), (4, 512, 1, 2, 1, 1),
        (4, 256, 1, 4, 1, 1), (8, 128, 1, 6, 1, 1), (8, 256, 4, 3, 2, 1), (8, 256, 8, 3, 2, 1),
        (8, 256, 2, 3, 2, 1), (8, 256, 4, 2, 2, 0), (8, 256, 8, 2, 3, 1), (4, 256, 4, 4, 2, 0),
        (4, 256, 8, 4, 2, 0), (4, 256, 8, 4, 3, 1), (4, 256, 4, 4, 3, 1), (4, 256, 8, 3, 4, 1),
        (4, 256, 128, 4, 3, 1), (4, 256, 128, 3, 4, 1), (8, 256, 128, 2, 3, 1),
        (4, 1024, 8, 1, 2, 0), (4, 512, 4, 2, 2, 0),
    ),
    True: (
        (4, 256, 8, 4, 3, 1), (4, 256, 4, 4, 3, 1), (4, 256, 2, 4, 2, 1), (4, 256, 1, 4, 1, 1),
        (8, 256, 1, 2, 1, 1), (8, 256, 2, 2, 2, 1), (8, 256, 4, 2, 3, 1), (8, 256, 8, 2, 3, 1),
        (4, 256, 4, 3, 3, 1), (4, 256, 8, 3, 4, 1), (4, 256, 16, 4, 3, 1), (4, 256, 8, 3, 2, 0),
        (4, 256, 4, 4, 1, 0), (4, 256, 8, 2, 5, 1), (4, 256, 128, 4, 3, 1), (4, 256, 128, 3, 4, 1),
        (8, 256, 128, 2, 3, 1), (4, 512, 8, 1, 4, 1), (8, 128, 4, 4, 3, 1), (4, 512, 4, 2, 3, 1),
    ),
}  # fmt: skip


def _walks(columns: int, kind: Kind, room: int) -> list[Block | Walk]:
    """Rows at a time above all: few begin often, many end at unlike times."""
    accesses = columns // kind.access
    found: list[Block | Walk] = []
    if 1024 <= accesses <= 4096:  # vectors, cluster, rows, resident
        ways = [(4, 2, 16, 4), (4, 1, 16, 2), (2, 2, 16, 2), (4, 2, 64, 4)]
        made = [walk(columns, kind, v, cluster=c, rows=n, resident=k) for v, c, n, k in ways]
        found += [one for one in made if one]
    if accesses < 4096:
        return found
    for vectors, threads, rows, resident, stages, held in (*WALKS, *FLOWS[kind.centred]):
        cluster = -(-accesses // (vectors * threads))
        if cluster not in (1, 2, 4, 8):
            continue
        one = walk(
            columns, kind, vectors, cluster=cluster, rows=rows, resident=resident, stages=stages,
            held=bool(held),
        )  # fmt: skip
        if one and resident * (one.shared(kind) + (5 << 10)) <= room and one not in found:
            found.append(one)
    return found


def candidates_backward(columns: int, kind: Kind, room: int) -> list[Stay]:
    """The backward configurations worth timing, as :func:`candidates`: shallow rings above all,
    since what is under way when the last row has been asked for is waited for."""
    ways = [(512, 4, 3), (512, 4, 2), (512, 2, 3), (512, 2, 2), (384, 4, 3), (384, 2, 3)]
    ways += [(640, 2, 3), (768, 1, 4), (640, 4, 2), (256, 4, 3), (256, 4, 2)]
    if kind.drop:
        ways += [(512, 1, 3), (640, 1, 3), (768, 1, 3), (1024, 1, 3)]
    found: list[Stay] = []
    for threads, vectors, stages in ways:
        for cluster in (1, 2, 4, 8):
            one = stay(
                columns, kind, room, threads=threads, vectors=vectors, cluster=cluster,
                resident=2 if threads == 256 else 1, stages=stages,
            )  # fmt: skip
            if one:
                both = [one, replace(one, lean=True)] if leans(kind) and cluster == 1 else [one]
                found += [way for way in both if way not in found]
                break
    return found
