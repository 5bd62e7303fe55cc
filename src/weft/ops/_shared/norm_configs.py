"""How rows of the norms are laid on threads: the CUDA kernels' configurations.

What counts on a device where copying is the limit is that loads never stop, and that a row is read
once: see docs/log.md for what each way reached.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from weft.ops._shared.norm_walks import Block, Kind, Walk, block, clustered

THREADS = 512  # a block of teams, by which 128 registers a thread fill a multiprocessor
ENOUGH = 24 << 10  # bytes of loads under way by which a multiprocessor's backward does not wait
NAMED = 15  # barriers by which teams of several warps meet: a block has 16, and one is its own
DROPPING = {96: 768, 128: 640, 512: 1024}  # a team's and its block's threads, of those timed
SHORT = ((2, 128), (3, 128), (4, 1024))  # accesses a thread, and of how many threads at most


@dataclass(frozen=True, kw_only=True)
class Long:
    """Forward: the row is walked three times, whatever its length."""

    threads: int = 512

    @property
    def macros(self) -> dict[str, object]:
        return {"THREADS": self.threads}

    @property
    def label(self) -> str:
        return str(self.threads)


@dataclass(frozen=True, kw_only=True)
class Stay:
    """Backward: ``team`` of a block's ``threads`` have a row, or with ``cluster`` above
    1 so many blocks do, ``vectors`` accesses a thread; ``stages`` rows are under way for each team,
    and a multiprocessor holds ``resident`` blocks. ``held``: weights stay in registers; else in
    shared memory. ``full``: every thread has all its accesses. ``lean``: the statistics of 16-bit
    rows about one reference (norm_lean.cuh), where a block has the row."""

    threads: int
    team: int
    vectors: int
    stages: int
    cluster: int = 1
    resident: int = 1
    held: bool = True
    full: bool = False
    lean: bool = False

    def __post_init__(self) -> None:
        if self.team % 32 or self.threads % self.team or not 32 <= self.threads <= 1024:
            raise ValueError(f"a team is some of a block's warps, not {self.team}, {self.threads}")
        if self.cluster not in (1, 2, 4, 8) or (self.cluster > 1 and self.team != self.threads):
            raise ValueError("a cluster is of 1, 2, 4 or 8 blocks, each of one team")
        if self.team > 32 and self.cluster == 1 and self.teams > NAMED:
            raise ValueError(f"{self.teams} teams of several warps, and {NAMED} barriers for them")
        if self.stages < 2:
            raise ValueError(f"two rows at least are under way, not {self.stages}")
        if self.lean and self.cluster > 1:
            raise ValueError("a cluster's blocks do not share a reference")

    @property
    def teams(self) -> int:
        return self.threads // self.team

    @property
    def macros(self) -> dict[str, object]:
        return {
            "THREADS": self.threads,
            "TEAM": self.team,
            "VECTORS": self.vectors,
            "STAGES": self.stages,
            "CLUSTER": self.cluster,
            "RESIDENT": self.resident,
            "HELD": int(self.held),
            "FULL": int(self.full),
            "LEAN": int(self.lean),
        }

    @property
    def label(self) -> str:
        """Unlike for unlike programs: what is compiled in."""
        held = f"{int(self.held)}{int(self.full)}" + "-lean" * self.lean
        size = f"{self.threads}-{self.team}x{self.vectors}-{self.stages}"
        return f"{size}-{self.cluster}-{self.resident}-{held}"


def shared(columns: int, kind: Kind, stay: Stay) -> int:
    """Dynamic shared memory of a block, in bytes: weights, rings, and then the teams' sums."""
    each = -(-columns // kind.access // stay.cluster)
    weights = 0 if stay.held else -(-each * kind.access * kind.w.itemsize // 128) * 128
    rings = stay.teams * stay.stages * (2 + kind.add) * each * 16
    each_team = 4 * (1 + kind.centred) * stay.vectors * kind.access * stay.team
    sums = each_team * stay.teams if stay.teams > 1 else 0
    return max(weights + rings, sums)


def _declared(kind: Kind, stay: Stay) -> int:
    """Static shared memory: barriers, two tables of the warps' sums, and what aligns them."""
    fields = (1 + kind.centred) * 2 + kind.centred
    entries = stay.cluster * stay.threads // 32
    return 8 * stay.teams * stay.stages + 8 * entries * fields + 256


def _registers(kind: Kind, team: int, vectors: int, held: bool) -> int:
    """What a thread of the backward keeps: its sums, the row's words (one warp alone: an access's),
    the weights' words."""
    columns = vectors * kind.access
    words = 4 * (1 if team == 32 else vectors) * (2 + kind.add)
    weights = columns * kind.w.itemsize // 4
    return columns * (1 + kind.centred) + words + (weights if held else 0)


def _team(accesses: int, threads: int, vectors: int, cluster: int) -> int:
    """The threads of the smallest team that holds a row; 0: these are too few, or do not divide."""
    team = -(-accesses // (32 * vectors)) * 32
    while threads % team or (team > 32 and threads > NAMED * team):
        team += 32
        if team > threads:
            return 0
    return threads if cluster > 1 else team


def stay(
    columns: int,
    kind: Kind,
    room: int,
    *,
    threads: int = THREADS,
    vectors: int = 4,
    cluster: int = 1,
    resident: int = 1,
    stages: int = 3,
) -> Stay | None:
    """The teams that ``threads`` with at most ``vectors`` accesses each make, or None: rows are too
    long for them, for their registers, or for ``room``, a multiprocessor's shared memory in bytes.
    """
    accesses = -(-columns // kind.access // cluster)
    budget = 65536 // (threads * resident) - 32
    for most in range(vectors, 0, -1):
        team = _team(accesses, threads, most, cluster)
        vectors = -(-accesses // team) if team else 0
        if team and _registers(kind, team, vectors, held=False) <= budget:
            break
    else:
        return None
    found = Stay(
        threads=threads,
        team=team,
        vectors=vectors,
        stages=2,
        cluster=cluster,
        resident=resident,
        held=_registers(kind, team, vectors, held=True) <= budget - 12,
        full=accesses == team * vectors and columns == accesses * kind.access * cluster,
    )
    for count in range(stages, 1, -1):
        tried = replace(found, stages=count)
        asked = shared(columns, kind, tried) + _declared(kind, tried) + 1024
        if asked * resident <= room:
            return tried
    return None


def leans(kind: Kind) -> bool:
    """Whether lean statistics are worth timing: of 16-bit rows, but for layer norm by itself, which
    is slower with them on an H200: results' sweep-norm-backward-2026-11-22.ndjson."""
    return kind.x.itemsize == 2 and (kind.add or not kind.centred)


def _dropping(columns: int, kind: Kind, room: int) -> Stay | None:
    """With dropout: teams of an access a thread, whose random numbers the many warps hide. A lean
    one of 512 threads has its block for itself, which an H200 is faster with than with two that are
    not lean; small lean ones are slower: sweep-norm-backward-2026-11-22.ndjson."""
    team = -(-columns // kind.access // 32) * 32
    if team > 512:
        return None
    lean = team == 512 and leans(kind)
    threads = team if lean else DROPPING.get(team) or team * max(1, 512 // team)
    found = stay(columns, kind, room, threads=threads, vectors=1)
    return replace(found, lean=lean) if found else None


def _smallest(columns: int, kind: Kind, room: int) -> Stay | None:
    """By the smallest cluster that holds a row; rather than by four blocks by eight of half their
    threads, two a multiprocessor (sweep-norm-backward-2026-11-22.ndjson). Rather by teams
    twice as wide, with their weights in registers, than by teams without; or, of filled accesses or
    a sum, than by a warp alone."""
    if kind.drop and (found := _dropping(columns, kind, room)):
        return found
    for cluster in (1, 2, 4, 8):
        found = stay(columns, kind, room, cluster=cluster)
        if found and cluster == 4:
            found = stay(columns, kind, room, threads=256, cluster=8, resident=2) or found
        if found:
            wider = stay(columns, kind, room, vectors=2) if cluster == 1 else None
            alone = found.team == 32 and wider and (wider.full or kind.add)
            return wider if wider and wider.held and (alone or not found.held) else found
    return None


def _shallow(columns: int, kind: Kind, found: Stay) -> Stay:
    """Of two stages where a row of each team is enough under way."""
    row = found.teams * (2 + kind.add) * columns * kind.x.itemsize // found.cluster
    return replace(found, stages=2) if row * found.resident >= ENOUGH else found


def _early(columns: int, kind: Kind, block: Block) -> bool:
    """Whether weights are worth asking for with the row: where threads have all their accesses, and
    registers for them. In between, and for a weight and a bias of long rows, they come as soon,
    asked for late, by more blocks at once."""
    words = 4 * block.vectors * (1 + kind.add)
    words += block.vectors * kind.access * kind.w.itemsize // 4 * (1 + kind.centred)
    full = columns == block.threads * block.vectors * kind.access
    between = 128 <= block.threads < (1024 if kind.centred else 512)
    return full and not between and words + 24 <= min(96, 65536 // block.threads)


def _short(columns: int, kind: Kind) -> Block | None:
    """A block a row of 4096 accesses at most; the fewer threads wait at its barrier, the better."""
    ways = [(one, most) for v, most in SHORT if (one := block(columns, kind, v))]
    fitting = [one for one, most in ways if one.threads <= most]
    filled = (b for b in fitting if columns == b.threads * b.vectors * kind.access)
    return next(filled, None) or next(iter(fitting), None)


@cache
def configure(columns: int, kind: Kind, room: int) -> Block | Walk | Long:
    """The forward's. ``room``: shared memory of a multiprocessor in bytes, 0 where there are no
    clusters. Of the configurations timed on an H200 the fastest."""
    one = _short(columns, kind)
    kept = clustered(columns, kind) if room else None
    if one and not (kept and kept.stages and one.threads > 512):
        return block(columns, kind, one.vectors, early=_early(columns, kind, one)) or one
    if kept and kept.threads <= 256:
        return kept
    for vectors, most in ((8, 256), (4, 1024)):
        for cluster in (4, 8) if room else ():
            more = block(columns, kind, vectors, cluster=cluster)
            if more and more.threads <= most:
                return more
    return Long()


@cache
def configure_backward(columns: int, kind: Kind, room: int, teams: int) -> Stay | None:
    """The backward's, or None: rows of any length and alignment, in three kernels. A block has
    ``teams`` at most, a power of two: fewer where rows are few, so that every multiprocessor has
    some."""
    if not room or not kind.wide:
        return None
    found = _smallest(columns, kind, room)
    if found and found.teams > teams:
        found = stay(columns, kind, room, threads=found.team * teams, vectors=found.vectors)
    if kind.drop or not found:
        return found
    # Faster with a sum, and for RMS norm of long rows; short ones are as they were.
    return replace(_shallow(columns, kind, found), lean=found.cluster == 1 and leans(kind))
