"""The norms' forward by blocks that hold a row, or several in a cluster: what their kernels are
compiled for, and the sizes by which rows of a length are taken."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a program is compiled for: types, elements an access, and which of the norms; ``drop``:
    x is dropped out before it is added."""

    x: torch.dtype
    w: torch.dtype
    access: int
    centred: bool
    add: bool
    drop: bool = False

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
            **({"DROP": 1} if self.drop else {}),
        }

    @property
    def label(self) -> str:
        words = [str(self.x).removeprefix("torch."), str(self.w).removeprefix("torch.")]
        flags = f"{int(self.centred)}{int(self.add)}" + "1" * self.drop
        return "-".join([*words, flags])


def hold(threads: int, cluster: int) -> None:
    if threads % 32 or not 32 <= threads <= 1024:
        raise ValueError(f"a block is of 1 to 32 warps, not of {threads} threads")
    if cluster not in (1, 2, 4, 8):
        raise ValueError(f"a cluster is of 1, 2, 4 or 8 blocks, not of {cluster}")


@dataclass(frozen=True, kw_only=True)
class Block:
    """Forward: a block, or a ``cluster`` of them above 1, has ``rows`` in registers, ``vectors``
    accesses a thread of each. ``early``: its weights are asked for with them; else once their
    statistics are known, an access at a time. ``full``: every thread has all its accesses, and no
    load waits for being asked whether. ``stream``: rows give way to weights in L1."""

    threads: int
    vectors: int
    cluster: int = 1
    rows: int = 1
    early: bool = False
    full: bool = False
    stream: bool = False

    def __post_init__(self) -> None:
        hold(self.threads, self.cluster)
        if self.rows not in (1, 2, 4):
            raise ValueError(f"a block has 1, 2 or 4 rows, not {self.rows}")

    @property
    def macros(self) -> dict[str, object]:
        return {
            "THREADS": self.threads,
            "VECTORS": self.vectors,
            "CLUSTER": self.cluster,
            "ROWS": self.rows,
            "EARLY": int(self.early),
            "FULL": int(self.full),
            "STREAM": int(self.stream),
        }

    @property
    def label(self) -> str:
        """Unlike for unlike programs: what is compiled in."""
        flags = f"{int(self.early)}{int(self.full)}{int(self.stream)}"
        return f"{self.threads}x{self.vectors}-{self.cluster}-{self.rows}-{flags}"


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Forward: a ``cluster`` of blocks takes up to ``rows`` one after another, and reads its
    weights once; ``vectors`` accesses a thread, and a multiprocessor holds ``resident`` blocks. The
    next row comes in registers, or with ``stages`` above 0 so many rows come in shared memory.
    ``held``: then weights stay in registers; else in shared memory."""

    threads: int
    vectors: int
    cluster: int
    rows: int
    resident: int
    full: bool = False
    stages: int = 0
    held: bool = False

    def __post_init__(self) -> None:
        hold(self.threads, self.cluster)
        if self.rows < 1:
            raise ValueError(f"a cluster takes a row at least, not {self.rows}")
        if self.held and not self.stages:
            raise ValueError("weights are held in registers where no row comes in them")

    @property
    def kernel(self) -> str:
        """Also its file's name."""
        return "norm_flow" if self.stages else "norm_walk"

    @property
    def macros(self) -> dict[str, object]:
        found: dict[str, object] = {
            "THREADS": self.threads,
            "VECTORS": self.vectors,
            "CLUSTER": self.cluster,
            "RESIDENT": self.resident,
            "FULL": int(self.full),
        }
        return found | {"STAGES": self.stages, "HELD": int(self.held)} if self.stages else found

    @property
    def label(self) -> str:
        """Unlike for unlike ways; how many rows are taken is not compiled in."""
        size = f"{self.threads}x{self.vectors}-{self.cluster}-{self.rows}"
        size += f"-{self.resident}-{int(self.full)}"
        return f"flow{size}-{self.stages}-{int(self.held)}" if self.stages else f"walk{size}"

    def shared(self, kind: Kind) -> int:
        """Dynamic shared memory of a block, in bytes: rows on their way, weights, and shifts."""
        part = self.threads * self.vectors
        weights = 0 if self.held else (1 + kind.centred) * part * kind.access * kind.w.itemsize
        return self.stages * (1 + kind.add) * part * 16 + weights


def block(
    columns: int,
    kind: Kind,
    vectors: int,
    *,
    early: bool = False,
    cluster: int = 1,
    rows: int = 1,
    stream: bool = False,
) -> Block | None:
    """The block of the fewest threads by these accesses each; None: more than 1024."""
    accesses = -(-columns // kind.access // cluster)
    threads = -(-accesses // (32 * vectors)) * 32
    if threads > 1024:
        return None
    full = columns == threads * vectors * kind.access * cluster
    return Block(
        threads=threads, vectors=vectors, cluster=cluster, rows=rows, early=early,
        full=full, stream=stream,
    )  # fmt: skip


def walk(
    columns: int, kind: Kind, vectors: int, *, cluster: int, rows: int, resident: int,
    stages: int = 0, held: bool = False,
) -> Walk | None:  # fmt: skip
    """The walk of the fewest threads by these accesses each; None: more than 1024, or accesses
    that the kernel does not take."""
    one = block(columns, kind, vectors, cluster=cluster) if kind.wide else None
    if one is None:
        return None
    return Walk(
        threads=one.threads, vectors=vectors, cluster=cluster, rows=rows, resident=resident,
        full=one.full, stages=stages, held=held,
    )  # fmt: skip


def clustered(columns: int, kind: Kind) -> Walk | None:
    """What ships for rows past a block's. Weights are as many bytes from L2 as the row, which L2
    bears; or with a bias twice: read once for two rows, or, where a cluster is all that fits, for
    as many as it takes."""
    if kind.add or kind.w != kind.x:
        return walk(columns, kind, 4, cluster=8, rows=8, resident=4 - 2 * kind.add)
    rows, vectors, resident = (2, 4, 4) if kind.centred else (1, 8, 3)
    ways = (
        walk(
            columns, kind, vectors, cluster=cluster, rows=rows, resident=resident, stages=rows,
            held=True,
        )
        for cluster in (2, 4, 8)
    )  # fmt: skip
    found = next((one for one in ways if one and one.threads <= 256), None)
    if found or not kind.centred:
        return found
    return walk(columns, kind, 8, cluster=8, rows=128, resident=2, stages=3, held=True)
