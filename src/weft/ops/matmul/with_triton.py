"""The matrix product in Triton: one kernel loads tiles by tensor descriptors, one by pointers.

Both take the tiles of c in bands of GROUP rows of tiles, so that the tiles in flight at one time share rows
of a and columns of b in the L2 cache. Triton 3.6's warp specialisation does not compile the first kernel for
sm_90: its pass supports neither the split tile nor the store. It is not used.
"""

from __future__ import annotations

import torch

from weft.backends.triton_jit import INTERPRETED, TritonAotKernel, tl, triton
from weft.core import YES, Case, Implementation, Support, no
from weft.machine.device_limits import has_tma, num_sms
from weft.ops._common.tiles_triton import tile_position
from weft.ops.matmul.spec import backward_by
from weft.ops.matmul.triton_configs import CANDIDATES, SHIPPED, WITHOUT_DESCRIPTORS, Config

__all__ = ["CANDIDATES", "IMPLEMENTATION", "forward_with"]

DESCRIPTOR_ARCH = 90  # the first with TMA, which reads tensor descriptors


@triton.jit
def matmul_descriptors(
    a_desc,
    b_desc,
    c_desc,
    m,
    n,
    k,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    FLATTEN: tl.constexpr,
    TF32: tl.constexpr,
):
    # a: (M, K), or stored as (K, M) if A_TRANSPOSED; b: (K, N), or stored as (N, K) if B_TRANSPOSED; c: (M,
    # N). Persistent: a program takes tiles pid, pid + programs, ... Beyond the edges a descriptor reads 0
    # and writes nothing. HALVES stores a tile in two parts: the staging of stores needs half the shared
    # memory.
    PRECISION: tl.constexpr = "tf32" if TF32 else "ieee"
    row_tiles = tl.cdiv(m, BM)
    column_tiles = tl.cdiv(n, BN)
    k_tiles = tl.cdiv(k, BK)
    first = tl.program_id(0)
    # A second counter beside the loop variable: when FLATTEN merges the two loops, the loads of the next tile
    # are issued before this tile is stored, so that loads and stores need a position each.
    stored = first - tl.num_programs(0)
    for tile in tl.range(first, row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile_position(tile, row_tiles, column_tiles, GROUP)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for i in range(k_tiles):
            if A_TRANSPOSED:
                a = a_desc.load([i * BK, row * BM]).T
            else:
                a = a_desc.load([row * BM, i * BK])
            if B_TRANSPOSED:
                b = b_desc.load([column * BN, i * BK]).T
            else:
                b = b_desc.load([i * BK, column * BN])
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        stored += tl.num_programs(0)
        row, column = tile_position(stored, row_tiles, column_tiles, GROUP)
        if HALVES:
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
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
    # a: (M, K) and b: (K, N) by any row and column strides, in elements; c: (M, N) contiguous. One tile of c
    # per program. Masked loads read 0 beyond an edge.
    PRECISION: tl.constexpr = "tf32" if TF32 else "ieee"
    row, column = tile_position(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    # 64 bits: row index times stride exceeds 2^31 in a large matrix.
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * a_row + inner.to(tl.int64)[None, :] * a_column
    b_ptrs = b_ptr + inner.to(tl.int64)[:, None] * b_row + columns.to(tl.int64)[None, :] * b_column
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for i in range(tl.cdiv(k, BK)):
        k_left = k - i * BK
        a = tl.load(a_ptrs, mask=(rows[:, None] < m) & (inner[None, :] < k_left), other=0.0)
        b = tl.load(b_ptrs, mask=(inner[:, None] < k_left) & (columns[None, :] < n), other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += BK * tl.cast(a_column, tl.int64)
        b_ptrs += BK * tl.cast(b_row, tl.int64)
    c_ptrs = c_ptr + rows.to(tl.int64)[:, None] * n + columns[None, :]
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=inside)


def choose(a: torch.Tensor, b: torch.Tensor, precision: str) -> Config:
    """Return the configuration shipped for a product of this size, dtype and memory layout."""
    kind = precision if a.dtype == torch.float32 else "half"
    tiles = triton.cdiv(a.shape[0], 128) * triton.cdiv(b.shape[1], 128)
    chosen = next(config for least, config in SHIPPED[kind] if tiles >= least)
    if chosen.descriptors and not descriptors_fit(a, b):
        chosen = next(config for least, config in WITHOUT_DESCRIPTORS[kind] if tiles >= least)
    return chosen


def descriptors_fit(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if device, addresses and strides let TMA read a and b and write c."""
    if not INTERPRETED and not has_tma(a.device):
        return False
    return b.shape[1] * b.element_size() % 16 == 0 and all(_has_aligned_rows(x) for x in (a, b))


def _has_aligned_rows(x: torch.Tensor) -> bool:
    """True if one stride is 1, and the other a multiple of 16 bytes without overlapping rows."""
    if x.data_ptr() % 16:
        return False
    (rows, columns), strides = x.shape, x.stride()
    pitch, length = (strides[0], columns) if strides[1] == 1 else (strides[1], rows)
    return 1 in strides and pitch >= length and pitch * x.element_size() % 16 == 0


def forward_with(
    config: Config, a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee"
) -> torch.Tensor:
    """Return a (M, K) @ b (K, N), computed with one configuration; M, N and K may be 0."""
    (m, k), n = a.shape, b.shape[1]
    # An empty sum is 0: for K = 0 c is a matrix of zeros.
    if 0 in (m, n, k):
        return a.new_zeros(m, n)
    c = a.new_empty(m, n)
    tiles = triton.cdiv(m, config.bm) * triton.cdiv(n, config.bn)
    shape = {"BM": config.bm, "BN": config.bn, "BK": config.bk, "GROUP": config.group}
    launch = {"num_warps": config.warps, "num_stages": config.stages, "TF32": precision == "tf32"}
    if not config.descriptors:
        matmul_pointers[(tiles,)](a, b, c, m, n, k, *a.stride(), *b.stride(), **shape, **launch)
        return c
    # In the interpreter 3 programs suffice to run the persistent loop several times.
    programs = min(tiles, num_sms(a.device, interpreted=3)) if config.persistent else tiles
    # A transposed operand is described as it is stored: TMA needs adjacent elements in the last dimension.
    a_desc, a_transposed = _descriptor(a, config.bm, config.bk)
    b_desc, b_transposed = _descriptor(b, config.bk, config.bn)
    c_desc, _ = _descriptor(c, config.bm, config.bn // 2 if config.halves else config.bn)
    matmul_descriptors[(programs,)](
        a_desc,
        b_desc,
        c_desc,
        m,
        n,
        k,
        A_TRANSPOSED=a_transposed,
        B_TRANSPOSED=b_transposed,
        HALVES=config.halves,
        FLATTEN=config.flatten,
        **shape,
        **launch,
    )
    return c


def _descriptor(x: torch.Tensor, rows: int, columns: int) -> tuple[object, bool]:
    """Return a descriptor of x in blocks of rows x columns, and True if x is stored transposed."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    transposed = x.stride(1) != 1
    if transposed:
        x, rows, columns = x.t(), columns, rows
    pitch = [x.stride(0), 1]
    return TensorDescriptor(x, list(x.shape), pitch, [rows, columns]), transposed


def forward(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    return forward_with(choose(a, b, precision), a, b, precision=precision)


def supports(case: Case, device: str) -> Support:
    if case.params.get("precision") == "tf32" and device == "cpu":
        return no("a CPU has no tf32; use precision='ieee' there")
    return YES


def _aot_kernels() -> tuple[TritonAotKernel, ...]:
    aot_kernels: list[TritonAotKernel] = []
    for config in dict.fromkeys(c for _, c in SHIPPED["half"] + WITHOUT_DESCRIPTORS["half"]):
        aot_kernels += [_aot_kernel(config, dtype, "ieee", "") for dtype in ("bf16", "fp16")]
    wide = SHIPPED["half"][0][1]
    aot_kernels += [_aot_kernel(wide, "bf16", "ieee", transposed) for transposed in ("a", "b")]
    for precision in ("tf32", "ieee"):
        for config in dict.fromkeys(c for _, c in SHIPPED[precision] + WITHOUT_DESCRIPTORS[precision]):
            aot_kernels.append(_aot_kernel(config, "fp32", precision, ""))
    return tuple(aot_kernels)


def _aot_kernel(config: Config, dtype: str, precision: str, transposed: str) -> TritonAotKernel:
    """Return the kernel for sizes divisible by 16; ``transposed`` names the operands stored transposed."""
    bm, bn, bk = config.bm, config.bn, config.bk
    signature: dict[str, object] = {"m": "i32:16", "n": "i32:16", "k": "i32:16"}
    if config.descriptors:
        stored = bn // 2 if config.halves else bn
        blocks = {
            "a_desc": (bk, bm) if "a" in transposed else (bm, bk),
            "b_desc": (bn, bk) if "b" in transposed else (bk, bn),
            "c_desc": (bm, stored),
        }
        described = {
            name: f"tensordesc<{dtype}[{rows}, {columns}]>" for name, (rows, columns) in blocks.items()
        }
        signature = {**described, **signature}
        signature |= {"A_TRANSPOSED": "a" in transposed, "B_TRANSPOSED": "b" in transposed}
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
    names += [f"{transposed}-transposed"] if transposed else []
    return TritonAotKernel(
        label="-".join(names),
        kernel=kernel,
        signature=order,
        num_warps=config.warps,
        num_stages=config.stages,
        min_arch=DESCRIPTOR_ARCH if config.descriptors else 80,
    )


IMPLEMENTATION = Implementation(
    operator="matmul",
    backend="triton",
    forward=forward,
    backward=backward_by(forward),
    supports=supports,
    aot_kernels=_aot_kernels(),
    idea="tensor cores fed by the copy engine, one program per SM",
)
