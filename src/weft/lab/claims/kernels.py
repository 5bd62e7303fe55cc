"""Claims about kernels: fusion, occupancy, waves of blocks, atomics, divergence, and what compilers do."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from math import ceil
from pathlib import Path

from weft.core.cost import Cost
from weft.core.errors import WeftError
from weft.lab.claims.bounds import build_case, operator_cost
from weft.lab.claims.ledger import (
    COMMON,
    DEPENDS,
    FALSE,
    MEASURED,
    TRUE,
    Evidence,
    Source,
    claim,
    cold_us,
    demo_ratio,
    plateaus,
    record,
)
from weft.lab.claims.memory import bytes_in_flight
from weft.machine import specs

VOLKOV = Source(
    "Vasily Volkov",
    "Better Performance at Lower Occupancy",
    2010,
    "https://www.nvidia.com/content/GTC-2010/pdfs/2238_GTC2010.pdf",
)
REDUCTION = Source(
    "Mark Harris",
    "Optimizing Parallel Reduction in CUDA",
    2007,
    "https://developer.download.nvidia.com/assets/cuda/files/reduction.pdf",
)
BRRR = Source("Horace He", "Making Deep Learning Go Brrrr From First Principles", 2022)
BACKGROUND = Source(
    "NVIDIA",
    "Matrix Multiplication Background User's Guide",
    2023,
    "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/",
)
PROGRAMMING = Source(
    "NVIDIA", "CUDA C++ Programming Guide", 2025, "https://docs.nvidia.com/cuda/cuda-c-programming-guide/"
)
RMS_NORM = Source(
    "Biao Zhang, Rico Sennrich",
    "Root Mean Square Layer Normalization",
    2019,
    "https://arxiv.org/abs/1910.07467",
)
SMS = 132  # SMs of the measured GPU
MAX_THREADS = 2048  # resident threads of an SM
ARCH = "sm_90"
CODE = """
extern "C" __global__ void four_floats(const float* __restrict__ x, float* __restrict__ y) {
  int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  for (int k = 0; k < 4; ++k) y[i + k] = fmaxf(x[i + k], 0.0f);
}
extern "C" __global__ void one_float4(const float4* __restrict__ x, float4* __restrict__ y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float4 v = x[i];
  y[i] = make_float4(fmaxf(v.x, 0.0f), fmaxf(v.y, 0.0f), fmaxf(v.z, 0.0f), fmaxf(v.w, 0.0f));
}
extern "C" __global__ void tangent(const float* x, float* y) { y[threadIdx.x] = tanhf(x[threadIdx.x]); }
extern "C" __global__ void multiply_add(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x] * y[threadIdx.x] + 2.5f;
}
extern "C" __global__ void divide(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x] / y[threadIdx.x];
}
extern "C" __global__ void constant_loop(const float* x, float* y) {
  float sum = 0.0f;
  for (int k = 0; k < 16; ++k) sum += x[k * 32 + threadIdx.x];
  y[threadIdx.x] = sum;
}
extern "C" __global__ void variable_loop(const float* x, float* y, int n) {
  float sum = 0.0f;
#pragma unroll 1
  for (int k = 0; k < n; ++k) sum += x[k * 32 + threadIdx.x];
  y[threadIdx.x] = sum;
}
"""


@cache
def instructions(*options: str) -> dict[str, list[str]]:
    """Return the SASS instructions of each kernel of ``CODE``, compiled by NVRTC with these options."""
    from weft.backends import disassemble
    from weft.backends.nvrtc import CudaSource
    from weft.backends.support import missing_package

    if package := missing_package("cuda"):
        raise WeftError("the claims about compiled code", expected=f"the package {package}", got="none")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "claims.cu"
        file.write_text(CODE)
        text = disassemble.sass(CudaSource(file, ("tangent",), options=options).compile(ARCH))
    code: dict[str, list[str]] = {}
    for part in text.split(".section")[1:]:
        if name := re.match(r"\s*\.text\.(\w+)", part):
            code[name[1]] = re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][\w.]*)", part)
    return code


def _count(code: list[str], pattern: str) -> int:
    return sum(bool(re.match(pattern, instruction)) for instruction in code)


@claim(
    "occupancy-100",
    "A memory-bound kernel needs an occupancy of 100 %.",
    COMMON,
    argument="Little's law by measured latency and bandwidth: the occupancy at which enough bytes are in "
    "flight, for the bytes that one thread has in flight",
    expected=DEPENDS,
)
def full_occupancy_is_needed() -> Evidence:
    per_sm = bytes_in_flight(1)
    settings, figures = {}, {"bytes in flight an SM": per_sm}
    for nbytes in (4, 8, 16, 64):
        occupancy = per_sm / nbytes / MAX_THREADS
        settings[f"{nbytes} bytes in flight a thread"] = occupancy >= 1
        figures[f"occupancy needed, {nbytes} bytes"] = occupancy
    return Evidence(settings, figures)


@claim(
    "low-occupancy-suffices",
    "An occupancy of a tenth can be enough for full memory bandwidth, if each thread has several wide "
    "loads in flight.",
    VOLKOV,
    argument="Little's law by measured latency and bandwidth, for four loads of 16 bytes in flight a thread",
    expected=TRUE,
)
def low_occupancy_suffices() -> Evidence:
    occupancy = bytes_in_flight(1) / (4 * 16) / MAX_THREADS
    return Evidence({"four loads of 16 bytes": occupancy <= 0.1}, {"occupancy needed": occupancy})


@claim(
    "reduction-thirty-times",
    "Step by step, a reduction can be made thirty times faster than its first version.",
    REDUCTION,
    argument="Recorded times of the sum's ladder: its first steps over its last",
    expected=DEPENDS,
)
def a_reduction_becomes_thirty_times_faster() -> Evidence:
    first = {
        "atomics for each element": "cuda/01-global-atomics",
        "a tree in shared memory": "cuda/02-shared-tree",
    }
    settings, figures = {}, {}
    for case in ("fp32-2^28", "fp32-2^20"):
        for name, step in first.items():
            ratio = cold_us("sum", case, step) / cold_us("sum", case, "cuda")
            settings[f"from {name}, {case}"] = ratio >= 30
            figures[f"ratio, from {name}, {case}"] = ratio
    return Evidence(settings, figures)


@claim(
    "occupancy-irrelevant",
    "Occupancy does not matter if each SM has at least one resident block.",
    COMMON,
    argument="Measured time of a kernel with one resident block of 256 threads an SM, over eight",
    expected=FALSE,
)
def occupancy_does_not_matter() -> Evidence:
    ratio = demo_ratio("occupancy")
    return Evidence({"4 bytes in flight a thread": ratio < 1.1}, {"time of one block / of eight": ratio})


@claim(
    "one-block-more",
    "One block more than a full wave nearly doubles the time of a kernel with one block an SM.",
    BACKGROUND,
    argument="Waves are the number of blocks over the SMs, rounded up; and the measured ratio",
    expected=TRUE,
)
def one_block_more_doubles_the_time() -> Evidence:
    waves, measured = ceil((SMS + 1) / SMS) / ceil(SMS / SMS), demo_ratio("wave-quantization")
    settings = {"waves": waves == 2, "measured": measured >= 1.6}
    return Evidence(settings, {"ratio by waves": waves, "measured ratio": measured})


@claim(
    "wave-loss-at-most-two",
    "Wave quantisation costs at most a factor of two.",
    COMMON,
    argument="Waves rounded up over waves as a fraction, the largest over ranges of the number of blocks",
    expected=DEPENDS,
)
def wave_loss_is_at_most_two() -> Evidence:
    def worst(blocks: range) -> float:
        return max(ceil(n / SMS) * SMS / n for n in blocks)

    ranges = {
        "fewer blocks than SMs": range(1, SMS),
        "1 to 10 waves": range(SMS, 10 * SMS + 1),
        "over 10 waves": range(10 * SMS, 100 * SMS),
    }
    losses = {name: worst(blocks) for name, blocks in ranges.items()}
    return Evidence(
        {name: loss <= 2 for name, loss in losses.items()},
        {f"largest loss, {name}": loss for name, loss in losses.items()},
    )


@claim(
    "more-blocks-faster",
    "More blocks make a kernel faster, because the work is spread further.",
    COMMON,
    argument="The same work in b equal blocks, one an SM at a time, takes ceil(b / SMs) / b of it",
    expected=DEPENDS,
)
def more_blocks_are_faster() -> Evidence:
    def time(blocks: int) -> float:
        return ceil(blocks / SMS) / blocks

    pairs = ((66, 132), (132, 133), (133, 264), (264, 265), (264, 528))
    return Evidence(
        {f"{a} to {b} blocks": time(b) < time(a) for a, b in pairs},
        {f"time of {b} / of {a} blocks": time(b) / time(a) for a, b in pairs},
    )


def _tile_share(n: int) -> float:
    """Return the useful share of the SM time of an n x n product in tiles of 128 x 256, one an SM."""
    tiles = ceil(n / 128) * ceil(n / 256)
    return n * n / (ceil(tiles / SMS) * SMS * 128 * 256)


@claim(
    "powers-of-two-fastest",
    "Products reach the highest rate at sizes that are powers of two.",
    COMMON,
    argument="Share of the SMs' time that tiles of 128 x 256 use on 132 SMs, against other multiples of "
    "128 within an eighth",
    expected=DEPENDS,
)
def powers_of_two_are_fastest() -> Evidence:
    settings, figures = {}, {}
    for exponent in range(10, 14):
        n = 1 << exponent
        others = {m: _tile_share(m) for m in range(n - n // 8, n + n // 8 + 1, 128) if m != n}
        best = max(others, key=lambda m: others[m])
        settings[f"n = {n}"] = _tile_share(n) >= others[best]
        figures[f"share at {n}"], figures[f"share at {best}"] = _tile_share(n), others[best]
    return Evidence(settings, figures)


@claim(
    "atomics-slow",
    "Atomics make a reduction slow.",
    COMMON,
    argument="Atomic additions to one address, executed one after another at the recorded rate, over the "
    "time of the bytes: one for each element, each warp of 32, and every 2^15 elements",
    expected=DEPENDS,
)
def atomics_are_slow() -> Evidence:
    elements = 1 << 28
    atomics_us = cold_us("sum", "fp32-2^28", "cuda/01-global-atomics")
    bytes_us = cold_us("sum", "fp32-2^28", "cuda")
    nanoseconds = atomics_us * 1e3 / elements
    settings, figures = {}, {"ns an atomic to one address": nanoseconds, "us of the bytes": bytes_us}
    for name, group in (("one an element", 1), ("one a warp", 32), ("one for 2^15 elements", 1 << 15)):
        us = elements / group * nanoseconds / 1e3
        settings[name] = us > 0.1 * bytes_us
        figures[f"us of the atomics, {name}"] = us
    return Evidence(settings, figures)


@claim(
    "divergence-costs-branches",
    "Four branches of equal length in one warp take four times the time of one.",
    PROGRAMMING,
    argument="A warp executes the branches one after another: 8 of 32 threads take part; and the measured "
    "ratio",
    expected=TRUE,
)
def divergent_branches_serialise() -> Evidence:
    branches = [lane % 4 for lane in range(32)]
    rounds, measured = len(set(branches)), demo_ratio("divergence")
    settings = {"instructions issued": rounds == 4, "measured, within a quarter": measured >= 3}
    return Evidence(settings, {"rounds through the code": rounds, "measured ratio": measured})


@claim(
    "fusion-k-times",
    "Fusing k elementwise kernels makes them k times faster.",
    BRRR,
    argument="Bytes of k kernels, each reading and writing N bytes, over those of one; intermediates that "
    "stay in the L2 move at its measured bandwidth",
    expected=DEPENDS,
)
def fusion_of_k_kernels_is_k_times_faster() -> Evidence:
    l2, dram = plateaus("read_all")
    settings, figures = {}, {}
    for k in (2, 4):
        beyond = k * 2 / 2
        # The first read and the last write come from memory, all that lies between stays in the L2.
        within = (2 / dram + (2 * k - 2) / l2) / (2 / dram)
        for where, gain in (("beyond the L2", beyond), ("within the L2", within)):
            settings[f"{k} kernels, tensors {where}"] = gain >= 0.95 * k
            figures[f"gain, {k} kernels, {where}"] = gain
    return Evidence(settings, figures)


@claim(
    "fused-bias-gelu-twice",
    "Fusing a bias and GELU into one kernel is at least twice as fast as two kernels.",
    BRRR,
    argument="Measured times of torch's separate kernels over the fused one",
    expected=TRUE,
)
def fused_bias_gelu_is_twice_as_fast() -> Evidence:
    cases = ("bf16-65536x3072", "bf16-16384x16384")
    ratios = {c: cold_us("bias_gelu", c, "torch") / cold_us("bias_gelu", c, "cuda") for c in cases}
    return Evidence({c: r >= 2 for c, r in ratios.items()}, {f"ratio, {c}": r for c, r in ratios.items()})


@claim(
    "fused-epilogue",
    "Fusing GELU into the product before it saves a fifth of their time.",
    COMMON,
    argument="Roofs of the product and of GELU on {h200}, separate and fused, by the inner dimension K",
    expected=DEPENDS,
)
def fused_epilogue_saves_a_fifth() -> Evidence:
    gpu = specs.one("h200")
    settings, figures = {}, {}
    for k in (256, 768, 4096, 16384):
        product = operator_cost("linear", build_case("linear", (16384, 4096, k), "bfloat16"), "forward")
        gelu = operator_cost("gelu", build_case("gelu", (16384, 4096), "bfloat16"), "forward")
        roofs = [roof.seconds for cost in (product, gelu) if (roof := gpu.roof(cost))]
        saved = 1 - roofs[0] / sum(roofs)
        settings[f"K = {k}"] = saved >= 0.2
        figures[f"share saved, K = {k}"] = saved
    return Evidence(settings, figures)


@claim(
    "compiler-vectorises-loads",
    "The compiler merges four neighbouring float loads of a thread into one of 16 bytes.",
    COMMON,
    argument="SASS of a loop over four neighbours and of float4, compiled by NVRTC for sm_90: only the "
    "type tells the compiler that the address is aligned",
    expected=DEPENDS,
)
def compiler_merges_loads() -> Evidence:
    code = instructions()
    kernels = {"a float pointer": "four_floats", "a float4 pointer": "one_float4"}
    wide = {name: _count(code[kernel], r"LDG\.E\.128") for name, kernel in kernels.items()}
    narrow = _count(code["four_floats"], r"LDG\.E(?!\.128)")
    figures = {f"loads of 16 bytes, {name}": count for name, count in wide.items()}
    return Evidence(
        {name: count == 1 for name, count in wide.items()}, figures | {"loads of 4 bytes": narrow}
    )


@claim(
    "tanh-one-instruction",
    "tanhf is one instruction of the special function unit.",
    COMMON,
    argument="SASS of tanhf, compiled by NVRTC for sm_90 with and without --use_fast_math",
    expected=DEPENDS,
)
def tanh_is_one_instruction() -> Evidence:
    settings, figures = {}, {}
    for name, options in (("by default", ()), ("with --use_fast_math", ("--use_fast_math",))):
        code = instructions(*options)["tangent"]
        settings[name] = _count(code, r"MUFU\.TANH") == 1
        figures[f"floating-point instructions, {name}"] = _count(code, "MUFU|FFMA|FMUL|FADD|FSEL|FSETP")
    return Evidence(settings, figures)


@claim(
    "multiply-add-fused",
    "The compiler turns a * b + c into one fused multiply-add with one rounding.",
    PROGRAMMING,
    argument="SASS of the expression, compiled by NVRTC for sm_90 with and without --fmad=false",
    expected=DEPENDS,
)
def multiply_add_is_fused() -> Evidence:
    settings, figures = {}, {}
    for name, options in (("by default", ()), ("with --fmad=false", ("--fmad=false",))):
        code = instructions(*options)["multiply_add"]
        settings[name] = _count(code, "FFMA") == 1 and not _count(code, "FADD|FMUL")
        figures[f"FFMA, {name}"] = _count(code, "FFMA")
    return Evidence(settings, figures)


@claim(
    "division-one-instruction",
    "A float division costs about as much as a multiplication.",
    COMMON,
    argument="Floating-point instructions of both in SASS, compiled by NVRTC for sm_90",
    expected=FALSE,
)
def division_costs_a_multiplication() -> Evidence:
    settings, figures = {}, {}
    for name, options in (("by default", ()), ("with --use_fast_math", ("--use_fast_math",))):
        code = instructions(*options)
        count = {k: _count(code[k], "MUFU|FFMA|FMUL|FADD|FCHK|CALL") for k in ("divide", "multiply_add")}
        settings[name] = count["divide"] <= count["multiply_add"]
        figures[f"instructions of a division, {name}"] = count["divide"]
    return Evidence(settings, figures)


@claim(
    "loops-unrolled",
    "The compiler unrolls short loops by itself.",
    PROGRAMMING,
    argument="Backward branches in SASS of a loop with 16 steps, and of one with n steps that is told not "
    "to unroll",
    expected=DEPENDS,
)
def compiler_unrolls_loops() -> Evidence:
    code = instructions()
    loads = {name: _count(code[name], "LDG") for name in ("constant_loop", "variable_loop")}
    settings = {
        "a loop of 16 steps": loads["constant_loop"] == 16,
        "a loop of n steps with #pragma unroll 1": loads["variable_loop"] > 1,
    }
    return Evidence(settings, {f"loads in {name}": count for name, count in loads.items()})


@claim(
    "rms-norm-faster",
    "RMS norm is at least 7 % faster than layer norm.",
    RMS_NORM,
    argument="Both read and write the same bytes. Measured times: of separate torch operations, and of "
    "Weft's fused kernels",
    expected=DEPENDS,
)
def rms_norm_is_faster() -> Evidence:
    settings, figures = {}, {}
    for case in ("bf16-32768x1024", "bf16-32768x4096", "bf16-4096x65536"):
        for implementation in ("torch", "cuda"):
            ratio = cold_us("layer_norm", case, implementation) / cold_us("rms_norm", case, implementation)
            name = f"{implementation}, {case}"
            settings[name], figures[f"layer norm / RMS norm, {name}"] = ratio >= 1.07, ratio
    return Evidence(settings, figures)


@claim(
    "dropout-free",
    "Dropout costs nothing.",
    COMMON,
    argument="Measured time of a dropout kernel over a copy's roof; and of dropout inside a fused norm "
    "over the same norm without it",
    expected=DEPENDS,
)
def dropout_costs_nothing() -> Evidence:
    alone = cold_us("dropout", "bf16-16384x16384-0.1-seed38", "cuda")
    case = "bf16-32768x4096"
    fused = cold_us("dropout_add_layer_norm", case, "cuda") / cold_us("add_layer_norm", case, "cuda")
    ceilings = record(f"{MEASURED}/device.json")["ceilings"]
    copy_us = Cost(read=1 << 29, written=1 << 29).nbytes / ceilings["copy"] * 1e6
    settings = {"a kernel of its own": alone < 0.05 * copy_us, "inside a fused norm": fused < 1.02}
    return Evidence(settings, {"us of its own": alone, "us of a copy": copy_us, "norm with / without": fused})
