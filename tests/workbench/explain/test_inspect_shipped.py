"""Inspection of all shipped Triton and CUDA kernels for three targets.

Slow: another process compiles hundreds of kernels a target. Registers, stacks and occupancy are read of all;
instructions are counted of the bf16 kernels, which every implementation has. Each run compiles a sample for
sm_90, whose table is committed, and a smaller one for one of the other targets; WEFT_SAMPLE_SEED selects
them.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import sampling
from helpers.inspecting import weft
from helpers.paths import TESTS
from weft.backends import aot
from weft.backends import cubin as elf
from weft.backends.nvrtc import CudaSource
from weft.core import Implementation, registry
from weft.workbench.explain.inspect import tables
from weft.workbench.explain.inspect.compile import compile_kernels, with_counts
from weft.workbench.explain.inspect.dry_run import identity

ARCHS = (80, 90, 100)
# Number of kernels sampled from an implementation. The operators that `weft bench` runs first have one of
# each family (the label before its types and sizes), at least AT_LEAST, and for sm_90 RANDOM others. Shares
# of implementations that are compiled: by whether the operator is one of these, and the target sm_90.
# `make compile` and `weft inspect --all` cover all kernels.
SAMPLE = {80: 1, 90: 2, 100: 1}
SHARE = {(True, True): 1 / 4, (True, False): 1 / 4, (False, True): 1 / 6, (False, False): 1 / 8}
AT_LEAST = 4
RANDOM = 3
TYPE = re.compile(r"^(?:b?f(?:loat|p)?|tf)\d+")


def sample(name: str, implementation: Implementation, arch: int) -> Implementation:
    """Sample an implementation's kernels. Kernels known to spill come first, so that the sample has one."""
    # One of those that compile to the same code under two labels: the one that the committed table has.
    distinct = {identity(s): s for s in implementation.aot_kernels}.values()
    known = [s for s in distinct if aot.suits(s, arch)]
    share = SHARE[name in registry.FIRST_LOOK, arch == tables.ARCH]
    spills = any(s.label in SPILLING[arch] for s in known)
    # The compiling and the comparing process must select the same kernels.
    generator = random.Random(f"{sampling.seed()}/{name}/{implementation.name}/{arch}")
    if not (spills or sampling.runs_all()) and generator.random() >= share:
        return replace(implementation, aot_kernels=())
    in_table = name in registry.FIRST_LOOK and arch == tables.ARCH
    if in_table and sampling.runs_all():
        return implementation
    known.sort(key=lambda s: (s.label not in SPILLING[arch], "bf" not in s.label))
    few = known[: SAMPLE[arch]]
    if name in registry.FIRST_LOOK:
        families: dict[str, Any] = {}
        for aot_kernel in known:
            families.setdefault(TYPE.sub("", aot_kernel.label).partition("-")[0], aot_kernel)
        few = list(families.values())
        rest, missing = [s for s in known if s not in few], max(0, AT_LEAST - len(few))
        few += rest[:: max(1, len(rest) // max(1, missing))][:missing]
    if in_table:
        rest = [s for s in known if s not in few]
        few += generator.sample(rest, min(RANDOM, len(rest)))
    return replace(implementation, aot_kernels=tuple(few))


SCRIPT = """
import json, sys
sys.path[:0] = sys.argv[2:]
from weft.workbench.explain.inspect.subjects import Subjects, disable_interpreters
disable_interpreters()
from weft.core import registry
from weft.workbench.explain.inspect.compile import compile_kernels, with_counts
from test_inspect_shipped import sample
arch, kernels = int(sys.argv[1]), []
for name in registry.operator_names():
    for implementation in Subjects().compilable(name):
        if implementation.backend in ("triton", "cuda"):
            few = sample(name, implementation, arch)
            if implementation.aot_kernels and not few.aot_kernels:
                continue  # not in the sample
            kernels += compile_kernels(registry.operator(name), few, f"sm_{arch}")
with_bf16 = {(k.operator, k.implementation) for k in kernels if "bf" in k.program.label}
chosen, rest = [], []
for k in kernels:
    counted = "bf" in k.program.label or (k.operator, k.implementation) not in with_bf16
    (chosen if counted else rest).append(k)
print(json.dumps([k.to_json() for k in (*with_counts(chosen), *rest)]))
"""
# Shipped kernels that spill, by target; docs/speed/inspect.md lists them. softmax's has 8 vectors a thread
# in 64 registers and runs on targets without clusters; matmul's are limited to 256 registers.
SOFTMAX = {"softmax_block-float16-1024x8-32-1-1-8", "softmax_block-bfloat16-1024x8-32-1-1-8"}
HALF = ("float16", "bfloat16")
MATMUL = {f"mma-{t}-{tile}-01" for t in HALF for tile in ("256x128x4", "128x128x3")}
NORMS = {"norm_backward-bfloat16-bfloat16-111-512-32x3-2-1-1-11"}
# Norms of rows that are no whole aligned vectors: at most 72 bytes a thread, for more warps on an SM. A
# thread has the place and the value of an edge besides its vectors.
NORM = "bfloat16-bfloat16"
ODD_CLUSTERS = {
    f"norm_backward-{NORM}-10-peel1-256-256x4-2-8-2-00",
    *(f"norm_block-{NORM}-11-peel{peel}-1024x4-8-1-000-8" for peel in (1, 2)),
}
# Triton's sparse products and one of float64: 8 or 16 bytes, which its own counts of registers decide.
SPARSE = {
    80: {f"spmv_rows-{t}-i32" for t in ("fp16", "bf16")}
    | {f"spmm_rows-{t}-i64" for t in ("fp16", "bf16")}
    | {"spmm-float64-int32-32x1"},
    90: {"spmv_rows-fp32-i64"},
}
SPILLING = {
    80: SOFTMAX | MATMUL | SPARSE[80],
    90: SOFTMAX
    | ODD_CLUSTERS
    | SPARSE[90]
    | {
        "bfloat16-8-4",  # trilinear backward: 8 bytes
        f"norm_block-{NORM}-00-peel2-512x8-8-1-000-2-8",
    },
    100: SOFTMAX
    | {"8-bit-16"}  # transpose: 8 bytes
    | MATMUL
    | NORMS
    | ODD_CLUSTERS
    | {f"mma-{t}-256x128x4-00" for t in HALF}
    | {f"norm_backward-{NORM}-10-peel1-512-256x3-2-1-1-10"}
    | {f"norm_warp-{NORM}-{norm}-peel1-64x4-32-8" for norm in ("11", "01")},
}
# matmul's widest tile takes 192 KiB of shared memory; a block on sm_80 can have 163 KiB.
TOO_LARGE = {80: "256x128x4"}
# Implementations whose ``idea`` says so move 16 bytes at a time, as does Triton's code for aligned rows.
# Their kernels that load less, "operator kernel label" by the reason.
WIDE = re.compile(r"16.byte|16 bytes|vectors in flight|asynchronous copies")
NARROW_LOADS = {
    "tensors of any alignment or stride": r"_any |^linear_\w+ linear_\w+ \S+_any$|-1-1-1$|-peel\d|"
    r"^matmul matmul (?:fma-.*-(?:00|11)|mma-float32-.*-23)$| cross_entropy_\w+ \S+-by-column$",
    "an access of the size in the label": r"^transpose \S+ \d+-bit-[1248]$|"
    r"^(?:cumsum|stencil|conv1d|trilinear) \S+ (?:float32|b?float16)-[124](?:-\w+)?$|"
    r"^reduce reduce_columns \S+-1$|^spmm spmm_merge \S+-32x1$",
    "partial results, one a thread": r" (?:add|merge)_parts\w* | \w*sum_(?:few_)?partials | mean_of_rows |"
    r" conv1d_sums | stencil_weights | spmm_carry | decode_merge | norm_backward_columns | adamw_factors ",
    "sparse or sorted elements, one by one": r" (?:spmv|sort|topk)_rows | embedding_bounds | sum_segments |"
    r"^spmm \w+ transpose-|_2_4 (?:prune|expand)_rows |^sparse_linear linear_tiles |"
    r"^\w+ \w+ (?:sparse24|transposable)-(?:float32|b?float16)$",
    "few features of a point": r"^trilinear trilinear_\w+ trilinear_\w+-(?:bf16|fp16)-",
    "elements before each, which begin at no vector": r"^cumsum scan_\w+ scan_\S+-exclusive$",
}

# Kernels that load 16 bytes at a time and store less, "operator kernel label" by the reason. The others store
# 16 bytes at a time: NVRTC may split the store of a structure into stores of its elements, at up to three
# times the time; ops/_common/wide_store.cuh prevents that.
NARROW_STORES = {
    "a result for many elements": r"^(?:softmax softmax_(?:dots|statistics)|sum sum_(?:tiles|once|step)|"
    r"cross_entropy (?:cross_entropy_forward|mean_of_rows)|adamw adamw_norm(?:_many)?|cumsum tile_sums|"
    r"attention attention_wgmma_terms|attention_decode decode_(?:split|merge)|topk topk_(?:lists|rows)|"
    r"linear_cross_entropy head_references|embedding embedding_(?:bounds|merge)|segmented_cumsum tile_pairs|"
    r"segmented_sum sum_(?:tiles|segments)|(?:arg)?reduce reduce_(?:rows|parts|columns|tiles)|"
    r"spmv spmv_tiles|\w+ (?:column_total|column_pass|add_parts_kernel|norm_backward_columns|"
    r"norm_sum_(?:few_)?partials)) ",
    "neighbours of an accumulator of tensor cores, two a thread": r"^(?:matmul matmul mma-|"
    r"\w+ (?:few_rows_wgmma|matmul_wgmma_sum) |"
    r"\w+ matmul_(?:wgmma|pipeline|warp_roles|two_consumers|persistent) wgmma-(?:1\d_|.*-split)|"
    r"attention attention_wgmma_dq |conv2d conv2d )",
    "a sum of few slices of a product": r"^(?:scaled_matmul scaled_matmul_sum|matmul matmul_skinny_sum) ",
    "a copy that turns rows into columns by 4-byte accesses": r"^matmul transpose transpose-float32$",
    "rows that begin anywhere": r"^(?:cross_entropy cross_entropy_backward .*-50257-by-column$|"
    r"\w+ matmul_wgmma wgmma-\S+-any$|cumsum cumsum_(?:rows|tiles) b?float\d+-1|"
    r"linear linear_columns |segmented_cumsum .*-1(?:-reverse)?$|"
    r"\w+ \w+ (?:b?float\d+-[124](?:-k\d)?|trilinear_forward-fp16-2)$)",
}


@pytest.fixture(scope="module", params=ARCHS)
def shipped(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    done = weft("-c", SCRIPT, str(request.param), str(Path(__file__).parent), str(TESTS))
    assert done.returncode == 0, done.stderr[-2000:]
    return request.param, json.loads(done.stdout)


def bits(kernel: dict[str, Any]) -> int:
    """Return the widest load from global memory; a bulk engine moves more than 128 bits."""
    counts = kernel["counts"]
    if counts["bulk"]:
        return 128
    kinds = ("global loads", "generic loads", "async copies")
    return max((int(w) for k in kinds for w in counts["memory"].get(k, {})), default=0)


def stores_in_pieces(kernel: dict[str, Any]) -> bool:
    """Return True if a kernel loads 16 bytes at a time and stores less."""
    counts = kernel["counts"]
    kinds = ("global stores", "generic stores")
    widest = max((int(w) for k in kinds for w in counts["memory"].get(k, {})), default=128)
    by_bulk = any("stores" in k or "reductions" in k for k in counts["bulk"])
    return bits(kernel) >= 128 and widest < 128 and not by_bulk


def reasons(kernel: dict[str, Any], known: dict[str, str]) -> list[str]:
    name = f"{kernel['operator']} {kernel['kernel']} {kernel['label']}"
    return [reason for reason, pattern in known.items() if re.search(pattern, name)]


def loads_less_than_it_says(kernel: dict[str, Any]) -> bool:
    """Return True if a kernel loads less than 16 bytes at a time and its implementation says 16."""
    declared = registry.implementation(kernel["operator"], kernel["implementation"])
    return (declared.backend == "triton" or bool(WIDE.search(declared.idea))) and bits(kernel) < 128


def has_wide_step_so_far(step: Implementation) -> bool:
    """Return True if this step of a ladder, or one before it, moves 16 bytes at a time."""
    steps = (i for i in registry.implementations(step.operator) if i.is_step and i.backend == step.backend)
    return any(i.name <= step.name and WIDE.search(i.idea) for i in steps)


def faults(kernel: dict[str, Any], arch: int) -> list[str]:
    """Name the rules of accesses and tensor cores that a kernel's instructions break."""
    named, broken_rules = f"{kernel['operator']} {kernel['kernel']} {kernel['label']}", []
    if loads_less_than_it_says(kernel) and not reasons(kernel, NARROW_LOADS):
        broken_rules.append(f"{named} loads {bits(kernel)} bits")
    if stores_in_pieces(kernel) and not reasons(kernel, NARROW_STORES):
        broken_rules.append(f"{named} stores {kernel['counts']['memory']}")
    declared = registry.implementation(kernel["operator"], kernel["implementation"])
    is_early = declared.is_step and declared.backend == "cuda" and not has_wide_step_so_far(declared)
    if is_early and bits(kernel) > 64:
        broken_rules.append(f"{named}: earlier steps of a ladder have no vector loads")
    if kernel["operator"] == "matmul" and not kernel["label"].startswith(("fma", "ieee")):
        by_wgmma = kernel["label"].startswith(("wgmma", "few-rows"))
        newest = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[arch]
        kind = newest if kernel["implementation"] == "triton" or by_wgmma else "HMMA"
        # A kernel that adds the partial sums of a divided K, or copies an operand, multiplies nothing.
        is_copy = kernel["label"].startswith(("transpose", "align_rows"))
        expected = set() if kernel["kernel"].endswith("_sum") or is_copy else {kind}
        if (kinds := {name.partition(".")[0] for name in kernel["counts"]["tensor"]}) != expected:
            broken_rules.append(f"{named} has products by {kinds}, expected {expected}")
    return broken_rules


@pytest.mark.slow
@pytest.mark.sampled(1, each=lambda shipped: shipped == tables.ARCH)
def test_every_shipped_triton_and_cuda_kernel(shipped: tuple[int, list[dict[str, Any]]]) -> None:
    arch, kernels = shipped
    expected_kernels = {
        (i.operator, i.name, s.label)
        for name in registry.operator_names()
        for i in registry.implementations(name)
        for s in {identity(s): s for s in sample(name, i, arch).aot_kernels}.values()  # once each
        if i.backend in ("triton", "cuda") and aot.suits(s, arch)
    }
    assert {(k["operator"], k["implementation"], k["label"]) for k in kernels} == expected_kernels
    counted = [k for k in kernels if k["counts"]["instructions"]]
    implementations = {(k["operator"], k["implementation"]) for k in kernels}
    assert {(k["operator"], k["implementation"]) for k in counted} == implementations

    expected = SPILLING[arch] & {k["label"] for k in kernels}  # a sample has only some of them
    assert expected, "no spilling kernel is in the sample"
    assert {k["label"] for k in kernels if k["stack"]} == expected
    for kernel in counted:
        assert (kernel["spill_stores"] > 0) == (kernel["stack"] > 0), kernel["label"]

    assert [fault for kernel in counted for fault in faults(kernel, arch)] == []

    for kernel in kernels:
        occupied = kernel["occupancy"]
        if occupied is None:
            assert kernel["notes"] and not kernel["cases"], kernel["label"]
        else:
            too_large = arch in TOO_LARGE and TOO_LARGE[arch] in kernel["label"]
            assert occupied["share"] == 0 if too_large else 0 < occupied["share"] <= 1, kernel["label"]

    if arch == tables.ARCH:
        stale = [line for line in tables.differences(kernels) if not line.endswith(" is gone")]
        assert stale == [], f"{stale[:3]}; write it again: {tables.COMMAND}"
        declared_kernels = {
            (i.operator, i.name, s.label)
            for name in registry.operator_names()
            for i in registry.implementations(name)
            for s in i.aot_kernels
            if aot.suits(s, arch)
        }
        written = {(k["operator"], k["implementation"], k["label"]) for k in tables.committed()}
        assert written <= declared_kernels, f"write it again: {tables.COMMAND}"


PLANTED = """
#include "wide_store.cuh"
extern "C" __global__ void planted(const WEFT_T* x, WEFT_T* y) {
  using Pack = Vector<WEFT_T, 16 / sizeof(WEFT_T)>;
  const index_t at = (blockIdx.x * 256 + threadIdx.x) * (16 / sizeof(WEFT_T));
  Pack pack = *reinterpret_cast<const Pack*>(x + at);
  for (int j = 0; j < 16 / sizeof(WEFT_T); ++j) pack.at[j] = from_float<WEFT_T>(element(pack, j) + 1.0f);
  STORE;
}
"""
SPLIT = "for (int j = 0; j < 16 / sizeof(WEFT_T); ++j) y[at + j] = pack.at[j]"


@pytest.mark.parametrize("dtype", ["float", "__half", "__nv_bfloat16"])
def test_a_split_store_is_seen(dtype: str, tmp_path: Path) -> None:
    """A planted kernel that stores elements one by one fails the rule; the shared helper's store passes."""
    for store, expected in ((SPLIT, True), ("store_pack(y + at, pack)", False)):
        file = tmp_path / f"planted_{expected}.cu"
        file.write_text(PLANTED.replace("STORE", store))
        source = CudaSource(file, ("planted",), (("WEFT_T", dtype),), f"planted-{dtype}")
        shipped = replace(registry.implementation("relu", "cuda"), aot_kernels=(source,))
        (kernel,) = with_counts(compile_kernels(registry.operator("relu"), shipped, "sm_90"))
        seen = kernel.to_json()
        assert stores_in_pieces(seen) == expected and not reasons(seen, NARROW_STORES)


def test_the_rules_hold_in_the_whole_table() -> None:
    """Read the committed table, since the test above compiles a sample of it."""
    counted = [k for k in tables.committed() if k["counts"]["instructions"]]
    assert [fault for kernel in counted for fault in faults(kernel, tables.ARCH)] == []
    for is_narrow, known in ((loads_less_than_it_says, NARROW_LOADS), (stores_in_pieces, NARROW_STORES)):
        used = {reason for kernel in counted if is_narrow(kernel) for reason in reasons(kernel, known)}
        assert used == known.keys()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gelu", "softmax", "sum", "matmul"])
def test_registers_memory_and_occupancy_agree_with_the_driver(name: str) -> None:
    """Compare the values read from a cubin, and the occupancy, with the driver's for every CUDA kernel."""
    import torch

    from weft.backends.nvrtc import current_arch

    torch.zeros(1, device="cuda")  # creates the context that modules are loaded into
    implementation, operator = registry.implementation(name, "cuda"), registry.operator(name)
    arch = int(re.sub(r"\D", "", current_arch()))
    kernels = compile_kernels(operator, implementation, f"sm_{arch}")
    known = {(k.program.label, k.code.name): k for k in kernels}
    compared = 0
    for source in implementation.aot_kernels:
        for code in elf.kernels(source.compile(current_arch()), arch):
            loaded = source[code.name]
            attributes = loaded.handle.attributes
            assert attributes.num_regs == code.registers, (source.label, code.name)
            assert (attributes.local_size_bytes > 0) == (code.stack > 0), (source.label, code.name)
            kernel = known.get(
                (source.label, code.name)
            )  # None: the program is the same as another one with another label
            occupied = kernel.occupancy if kernel else None
            if kernel is None or occupied is None or kernel.code.registers != code.registers:
                continue  # no case launches it, or the `a` target compiles it differently
            dynamic = kernel.dynamic or 0
            if dynamic > 48 << 10:
                loaded._allow(dynamic)
            fits = loaded.handle.occupancy.max_active_blocks_per_multiprocessor
            assert fits(occupied.threads, dynamic) == occupied.blocks, kernel.title
            compared += 1
    assert compared
