"""The matrix product in Triton: one kernel reads tiles by tensor descriptors, one by pointers.

Both walk the tiles of c in bands of GROUP rows of tiles, so that the tiles in flight at one time
share their rows of a and columns of b in the L2 cache. Triton 3.6's warp specialisation does not
compile for the first on sm_90 (its pass knows neither the split tile nor the store): not used.
"""

from __future__ import annotations

from functools import cache

import torch

from weft.backends.triton_jit import INTERPRETED, TritonSpecimen, tl, triton
from weft.core import YES, Case, Implementation, Support, no
from weft.ops.matmul.triton_configs import CANDIDATES, DIRECT, SHIPPED, Config

__all__ = ["CANDIDATES", "IMPLEMENTATION", "forward_with"]

DESCRIPTOR_ARCH = 90  # the first with the copy engine that reads tensor descriptors


@triton.jit
def tile_place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row, column) of a tile, counted down bands of GROUP rows, each band column by column."""
    in_band = GROUP * column_tiles
    band = tile // in_band
    first = band * GROUP
    height = min(row_tiles - first, GROUP)
    within = tile % in_band
    return first + within % height, within // height


@triton.jit
def matmul_descriptors(
    a_desc,
    b_desc,
    c_desc,
    m,
    n,
    k,
    A_TURNED: tl.constexpr,
    B_TURNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    FLATTEN: tl.constexpr,
    TF32: tl.constexpr,
):
    # a: (M, K), or stored (K, M) where A_TURNED; b: (K, N), or stored (N, K) where B_TURNED;
    # c: (M, N). A program takes tiles pid, pid + programs, ... Beyond the edges a descriptor reads
    # 0 and writes nothing. HALVES stores a tile as two: its staging needs half the shared memory.
    PRECISION: tl.constexpr = "tf32" if TF32 else "ieee"
    row_tiles = tl.cdiv(m, BM)
    column_tiles = tl.cdiv(n, BN)
    k_tiles = tl.cdiv(k, BK)
    first = tl.program_id(0)
    # Counted apart from the loop's own variable: when FLATTEN makes one loop of the two, the next
    # tile's loads are issued before this tile is stored, and each needs its own place.
    stored = first - tl.num_programs(0)
    for tile in tl.range(first, row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile_place(tile, row_tiles, column_tiles, GROUP)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for i in range(k_tiles):
            if A_TURNED:  # noqa: SIM108 - Triton's own conditional, on a constant
                a = a_desc.load([i * BK, row * BM]).T
            else:
                a = a_desc.load([row * BM, i * BK])
            if B_TURNED:
                b = b_desc.load([column * BN, i * BK]).T
            else:
                b = b_desc.load([i * BK, column * BN])
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        stored += tl.num_programs(0)
        row, column = tile_place(stored, row_tiles, column_tiles, GROUP)
        if HALVES:
            both = tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1))
            left, right = tl.split(both)
            c_desc.store([row * BM, column * BN], left.to(c_desc.dtype))
            c_desc.store([row * BM, column * BN + BN // 2], right.to(c_desc.dtype))
        else:
            c_desc.store([row * BM, column * BN], acc.to(c_desc.dtype))


@triton.jit
def matmul_pointers(
    a_ptr,
    b_ptr,
    c_ptr,
    m,
    n,
    k,
    a_row,
    a_column,
    b_row,
    b_column,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    TF32: tl.constexpr,
):
    # a: (M, K) and b: (K, N) by row and column strides in elements, whatever they are; c: (M, N)
    # contiguous. One tile of c a program. Factors beyond an edge are read as 0.
    PRECISION: tl.constexpr = "tf32" if TF32 else "ieee"
    row, column = tile_place(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    # 64 bits: a row's number times its stride passes 2^31 in a large matrix.
    a_at = a_ptr + rows.to(tl.int64)[:, None] * a_row + inner.to(tl.int64)[None, :] * a_column
    b_at = b_ptr + inner.to(tl.int64)[:, None] * b_row + columns.to(tl.int64)[None, :] * b_column
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for i in range(tl.cdiv(k, BK)):
        left = k - i * BK
        a = tl.load(a_at, mask=(rows[:, None] < m) & (inner[None, :] < left), other=0.0)
        b = tl.load(b_at, mask=(inner[:, None] < left) & (columns[None, :] < n), other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_at += BK * tl.cast(a_column, tl.int64)
        b_at += BK * tl.cast(b_row, tl.int64)
    c_at = c_ptr + rows.to(tl.int64)[:, None] * n + columns[None, :]
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c_at, acc.to(c_ptr.dtype.element_ty), mask=inside)


def choose(a: torch.Tensor, b: torch.Tensor, precision: str) -> Config:
    """The configuration shipped for a product of this size, dtype and memory."""
    kind = precision if a.dtype == torch.float32 else "half"
    tiles = triton.cdiv(a.shape[0], 128) * triton.cdiv(b.shape[1], 128)
    chosen = next(config for least, config in SHIPPED[kind] if tiles >= least)
    if chosen.descriptors and not descriptors_fit(a, b):
        chosen = next(config for least, config in DIRECT[kind] if tiles >= least)
    return chosen


def descriptors_fit(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether device, addresses and strides let the copy engine read a and b and write c."""
    if not INTERPRETED and not _copies_tiles(a.device):
        return False
    return b.shape[1] * b.element_size() % 16 == 0 and all(_regular(x) for x in (a, b))


def _regular(x: torch.Tensor) -> bool:
    """One stride is 1 and the other a multiple of 16 bytes that lets no two rows overlap."""
    if x.data_ptr() % 16:
        return False
    (rows, columns), (down, across) = x.shape, x.stride()
    pitch, row = (down, columns) if across == 1 else (across, rows)
    return 1 in (down, across) and pitch >= row and pitch * x.element_size() % 16 == 0


@cache
def _copies_tiles(device: torch.device) -> bool:
    """Whether the device has the copy engine, and room for the tiles in flight."""
    major, minor = torch.cuda.get_device_capability(device)
    held = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return major * 10 + minor >= DESCRIPTOR_ARCH and held["max_shared_mem"] >= 227 * 1024


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 3  # interpreted: few programs, so that each takes several tiles
    return torch.cuda.get_device_properties(device).multi_processor_count


def forward_with(
    config: Config, a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee"
) -> torch.Tensor:
    """a (M, K) @ b (K, N) by one configuration; M, N and K may be 0."""
    (m, k), n = a.shape, b.shape[1]
    if 0 in (m, n, k):
        return a.new_zeros(m, n)
    c = a.new_empty(m, n)
    tiles = triton.cdiv(m, config.bm) * triton.cdiv(n, config.bn)
    shape = {"BM": config.bm, "BN": config.bn, "BK": config.bk, "GROUP": config.group}
    launch = {"num_warps": config.warps, "num_stages": config.stages, "TF32": precision == "tf32"}
    if not config.descriptors:
        matmul_pointers[(tiles,)](a, b, c, m, n, k, *a.stride(), *b.stride(), **shape, **launch)
        return c
    programs = min(tiles, _multiprocessors(a.device)) if config.persistent else tiles
    a_desc, a_turned = _descriptor(a, config.bm, config.bk)
    b_desc, b_turned = _descriptor(b, config.bk, config.bn)
    c_desc, _ = _descriptor(c, config.bm, config.bn // 2 if config.halves else config.bn)
    matmul_descriptors[(programs,)](
        a_desc,
        b_desc,
        c_desc,
        m,
        n,
        k,
        A_TURNED=a_turned,
        B_TURNED=b_turned,
        HALVES=config.halves,
        FLATTEN=config.flatten,
        **shape,
        **launch,
    )
    return c


def _descriptor(x: torch.Tensor, rows: int, columns: int) -> tuple[object, bool]:
    """A descriptor of x in blocks of rows x columns, and whether x is stored turned."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    turned = x.stride(1) != 1
    if turned:
        x, rows, columns = x.t(), columns, rows
    pitch = [x.stride(0), 1]
    return TensorDescriptor(x, list(x.shape), pitch, [rows, columns]), turned


def forward(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    return forward_with(choose(a, b, precision), a, b, precision=precision)


def backward(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee"
) -> tuple[torch.Tensor, torch.Tensor]:
    """da = grad @ b^T and db = a^T @ grad: views, read by the kernels as they are stored."""
    return (
        forward(grad, b.t(), precision=precision),
        forward(a.t(), grad, precision=precision),
    )


def supports(case: Case, device: str) -> Support:
    if case.params.get("precision") == "tf32" and device == "cpu":
        return no("a CPU has no tf32; use precision='ieee' there")
    return YES


def _specimens() -> tuple[TritonSpecimen, ...]:
    found: list[TritonSpecimen] = []
    for config in dict.fromkeys(c for _, c in SHIPPED["half"] + DIRECT["half"]):
        found += [
            _specimen(config, t, "ieee", turned) for t in ("bf16", "fp16") for turned in ("",)
        ]
    wide = SHIPPED["half"][0][1]
    found += [_specimen(wide, "bf16", "ieee", turned) for turned in ("a", "b")]
    for precision in ("tf32", "ieee"):
        for config in dict.fromkeys(c for _, c in SHIPPED[precision] + DIRECT[precision]):
            found.append(_specimen(config, "fp32", precision, ""))
    return tuple(found)


def _specimen(config: Config, dtype: str, precision: str, turned: str) -> TritonSpecimen:
    """What a product of sizes divisible by 16 compiles; ``turned``: the operands stored turned."""
    bm, bn, bk = config.bm, config.bn, config.bk
    signature: dict[str, object] = {"m": "i32:16", "n": "i32:16", "k": "i32:16"}
    if config.descriptors:
        stored = bn // 2 if config.halves else bn
        blocks = {
            "a_desc": (bk, bm) if "a" in turned else (bm, bk),
            "b_desc": (bn, bk) if "b" in turned else (bk, bn),
            "c_desc": (bm, stored),
        }
        described = {
            name: f"tensordesc<{dtype}[{rows}, {columns}]>"
            for name, (rows, columns) in blocks.items()
        }
        signature = {**described, **signature}
        signature |= {"A_TURNED": "a" in turned, "B_TURNED": "b" in turned}
        signature |= {"HALVES": config.halves, "FLATTEN": config.flatten}
    else:
        pointers = {f"{name}_ptr": f"*{dtype}" for name in "abc"}
        strides = {"a_row": "i32:16", "a_column": 1, "b_row": "i32:16", "b_column": 1}
        signature = {**pointers, **signature, **strides}
    signature |= {"BM": bm, "BN": bn, "BK": bk, "GROUP": config.group, "TF32": precision == "tf32"}
    kernel = matmul_descriptors if config.descriptors else matmul_pointers
    order = {name: signature[name] for name in kernel.arg_names}
    names = [precision if dtype == "fp32" else dtype, f"{bm}x{bn}x{bk}x{config.stages}"]
    names.append("descriptors" if config.descriptors else "pointers")
    names += [f"{turned}-turned"] if turned else []
    return TritonSpecimen(
        label="-".join(names),
        kernel=kernel,
        signature=order,
        num_warps=config.warps,
        num_stages=config.stages,
        min_arch=DESCRIPTOR_ARCH if config.descriptors else 80,
    )


IMPLEMENTATION = Implementation(
    operator="matmul",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    supports=supports,
    specimens=_specimens(),
    idea="tensor cores fed by the copy engine, one program a multiprocessor",
)
