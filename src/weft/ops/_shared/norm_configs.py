"""How rows of the norms are laid on threads: the CUDA kernels' configurations.

What counts on a device where copying is the limit is that loads never stop, and that a row is read
once: see docs/log.md for what each way reached.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

THREADS = 512  # a block of teams, by which 128 registers a thread fill a multiprocessor
ROOMY = 384  # by which 168 do: the weights fit in them, too, beside two sums a column
STAY_FROM = 8192  # columns: longer rows' weights come from L2 for every row, unless they stay
STAY_TO = 2048  # columns: up to here a warp or two have a row, with no barrier, or one of two warps
TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a program is compiled for: types, elements an access, and which of the norms."""

    x: torch.dtype
    w: torch.dtype
    access: int
    centred: bool
    add: bool

    @property
    def wide(self) -> bool:
        """Accesses of 16 bytes: what the bulk copy engine moves is made of them."""
        return self.access * self.x.itemsize == 16

    @property
    def macros(self) -> dict[str, object]:
        return {
            "WEFT_T": TYPES[self.x],
            "WEFT_W": TYPES[self.w],
            "CENTRED": int(self.centred),
            "ADD": int(self.add),
        }

    @property
    def label(self) -> str:
        words = [str(self.x).removeprefix("torch."), str(self.w).removeprefix("torch.")]
        return "-".join([*words, f"{int(self.centred)}{int(self.add)}"])


@dataclass(frozen=True, kw_only=True)
class Block:
    """Forward: a block has a row in registers, ``vectors`` accesses a thread. ``early``: its
    weights are asked for with it; else once its statistics are known, an access at a time.
    ``full``: every thread has all its accesses, and no load waits for being asked whether."""

    threads: int
    vectors: int
    early: bool = False
    full: bool = False


@dataclass(frozen=True, kw_only=True)
class Long:
    """Forward: the row is walked three times, whatever its length."""

    threads: int = 512


@dataclass(frozen=True, kw_only=True)
class Stay:
    """Forward and backward: ``team`` of a block's ``threads`` have a row, or with ``cluster`` above
    1 so many blocks do, ``vectors`` accesses a thread; ``stages`` rows are under way for each team,
    and a multiprocessor holds ``resident`` blocks. ``held``: weights stay in registers; else in
    shared memory. ``full``: every thread has all its accesses."""

    threads: int
    team: int
    vectors: int
    stages: int
    cluster: int = 1
    resident: int = 1
    held: bool = True
    full: bool = False

    def __post_init__(self) -> None:
        if self.team % 32 or self.threads % self.team or not 32 <= self.threads <= 1024:
            raise ValueError(f"a team is some of a block's warps, not {self.team}, {self.threads}")
        if self.cluster not in (1, 2, 4, 8) or (self.cluster > 1 and self.team != self.threads):
            raise ValueError("a cluster is of 1, 2, 4 or 8 blocks, each of one team")
        if self.stages < 2:
            raise ValueError(f"two rows at least are under way, not {self.stages}")

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
            "FULL": int(self.full),
        }

    @property
    def label(self) -> str:
        """Unlike for unlike programs: what is compiled in."""
        held = f"{int(self.held)}{int(self.full)}"
        size = f"{self.threads}-{self.team}x{self.vectors}-{self.stages}"
        return f"{size}-{self.cluster}-{self.resident}-{held}"


def shared(columns: int, kind: Kind, stay: Stay, backward: bool) -> int:
    """Dynamic shared memory of a block, in bytes: weights, rings, and then the teams' sums."""
    each = -(-columns // kind.access // stay.cluster)
    tensors = 1 + backward + kind.add
    weights = 0 if stay.held else -(-each * kind.access * kind.w.itemsize // 128) * 128
    rings = stay.teams * stay.stages * tensors * each * 16
    sums = 4 * stay.vectors * kind.access * stay.threads if backward and stay.teams > 1 else 0
    return max(weights + rings, sums)


def _declared(kind: Kind, stay: Stay, backward: bool) -> int:
    """Static shared memory: barriers, two tables of the warps' sums, and what aligns them."""
    fields = (1 + kind.centred) * (1 + backward) + kind.centred
    entries = stay.cluster * stay.threads // 32
    return 8 * stay.teams * stay.stages + 8 * entries * fields + 256


def _registers(kind: Kind, vectors: int, backward: bool, held: bool) -> int:
    """What a thread keeps: its sums, the row's words, the weights' words."""
    columns = vectors * kind.access
    sums = columns * (1 + kind.centred) if backward else 0
    words = 4 * vectors * (1 + backward + kind.add)
    weights = columns * kind.w.itemsize // 4 * (1 if backward else 1 + kind.centred)
    return sums + words + (weights if held else 0)


def stay(
    columns: int,
    kind: Kind,
    room: int,
    backward: bool,
    *,
    threads: int = THREADS,
    vectors: int = 4,
    cluster: int = 1,
    resident: int = 1,
    stages: int = 6,
) -> Stay | None:
    """The teams that ``threads`` with at most ``vectors`` accesses each make, or None: rows are too
    long for them, for their registers, or for ``room``, a multiprocessor's shared memory in bytes.
    """
    accesses = -(-columns // kind.access // cluster)
    budget = 65536 // (threads * resident) - 32
    while vectors > 1 and _registers(kind, vectors, backward, held=not backward) > budget:
        vectors //= 2
    team = 32
    while team * vectors < accesses:
        team *= 2
    if cluster > 1:
        team = threads
    if threads % team or team * vectors < accesses:
        return None
    vectors = -(-accesses // team)
    found = Stay(
        threads=threads,
        team=team,
        vectors=vectors,
        stages=2,
        cluster=cluster,
        resident=resident,
        held=_registers(kind, vectors, backward, held=True) <= budget - 8 * backward,
        full=accesses == team * vectors and columns == accesses * kind.access * cluster,
    )
    for count in range(stages, 1, -1):
        tried = replace(found, stages=count)
        asked = shared(columns, kind, tried, backward) + _declared(kind, tried, backward) + 1024
        if asked * resident <= room:
            return tried
    return None


def _smallest(columns: int, kind: Kind, room: int, backward: bool, threads: int) -> Stay | None:
    """By the smallest cluster that holds a row."""
    for cluster in (1, 2, 4, 8):
        found = stay(columns, kind, room, backward, threads=threads, cluster=cluster)
        if found:
            roomy = None if found.held else stay(columns, kind, room, backward, threads=ROOMY)
            return roomy if roomy and roomy.held else found
    return None


def _block(columns: int, kind: Kind, vectors: int, early: bool = False) -> Block:
    accesses = columns // kind.access
    threads = -(-accesses // (32 * vectors)) * 32
    full = early and accesses == threads * vectors
    return Block(threads=threads, vectors=vectors, early=early, full=full)


@cache
def configure(columns: int, kind: Kind, room: int, many: bool) -> Block | Long | Stay:
    """The forward's. ``room``: shared memory of a multiprocessor in bytes, 0 where there is no bulk
    copy engine. ``many``: rows enough for every team of a full device to take several."""
    between = STAY_TO < columns <= STAY_FROM
    if room and many and kind.wide and not between:
        found = _smallest(columns, kind, room, False, THREADS)
        if found:
            return found
    for vectors, most in ((2, 128), (4, 1024)):
        one = _block(columns, kind, vectors)
        if one.threads <= most:
            return one
    return Long()


@cache
def configure_backward(columns: int, kind: Kind, room: int, teams: int) -> Stay | None:
    """The backward's, or None: rows of any length and alignment, in three kernels. A block has
    ``teams`` at most, a power of two: fewer where rows are few, so that every multiprocessor has
    some."""
    if not room or not kind.wide:
        return None
    found = _smallest(columns, kind, room, True, THREADS)
    if found and found.teams > teams:
        return stay(columns, kind, room, True, threads=found.team * teams)
    return found


def candidates(columns: int, kind: Kind, room: int) -> list[Block | Long | Stay]:
    """The forward configurations worth timing for rows of ``columns``, moved 16 bytes at a time on
    a device with clusters."""
    found: list[Block | Long | Stay] = []
    for vectors in (2, 4):
        one = _block(columns, kind, vectors)
        if one.threads <= 1024:
            found += [one, _block(columns, kind, vectors, early=True)]
    return [*found, *_stays(columns, kind, room, backward=False), Long()]


def candidates_backward(columns: int, kind: Kind, room: int) -> list[Stay]:
    """The backward configurations worth timing, as :func:`candidates`."""
    return _stays(columns, kind, room, backward=True)


def _stays(columns: int, kind: Kind, room: int, backward: bool) -> list[Stay]:
    """One block of 512 threads or two of 256, 384 with more registers each or 1024 with half the
    columns, the two smallest clusters; deep rings and shallow ones."""
    found: list[Stay] = []
    ways = ((512, 4, 1), (512, 2, 1), (384, 4, 1), (256, 4, 2), (1024, 2, 1))
    for threads, vectors, resident in ways:
        fitting = 0
        for cluster in (1, 2, 4, 8):
            for stages in (6, 3):
                one = stay(
                    columns, kind, room, backward, threads=threads, vectors=vectors,
                    cluster=cluster, resident=resident, stages=stages,
                )  # fmt: skip
                if one and one not in found:
                    found.append(one)
            fitting += one is not None
            if fitting == 2 or (fitting and columns <= STAY_FROM):
                break
    return found
