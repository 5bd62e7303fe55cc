"""Claims about memory: bandwidth, latency, caches, coalescing, and which operators the memory bounds."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from weft.core import registry
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
    warm_us,
)
from weft.machine import specs

BEST_PRACTICES = Source(
    "NVIDIA",
    "CUDA C++ Best Practices Guide",
    2025,
    "https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/",
)
SHARED_MEMORY = Source(
    "Mark Harris",
    "Using Shared Memory in CUDA C/C++",
    2013,
    "https://developer.nvidia.com/blog/using-shared-memory-cuda-cc/",
)
VECTORS = Source(
    "Justin Luitjens",
    "CUDA Pro Tip: Increase Performance with Vectorized Memory Access",
    2013,
    "https://developer.nvidia.com/blog/cuda-pro-tip-increase-performance-with-vectorized-memory-access/",
)
ROOFLINE = Source(
    "Samuel Williams, Andrew Waterman, David Patterson",
    "Roofline: an insightful visual performance model for multicore architectures",
    2009,
    "https://doi.org/10.1145/1498765.1498785",
)
ONLINE = Source(
    "Maxim Milakov, Natalia Gimelshein",
    "Online normalizer calculation for softmax",
    2018,
    "https://arxiv.org/abs/1805.02867",
)
GELU_FLOPS, NORM_FLOPS = 20, 10  # an element, counted generously: tanh as ten
SECTOR = 32  # bytes of a sector, the least that a load moves


def _intensity(operator: str, flops: float) -> float:
    """Return the FLOPs a byte of an elementwise forward in bf16."""
    shape = (4096, 4096)
    cost = operator_cost(operator, build_case(operator, shape, "bfloat16"), "forward")
    return flops * math.prod(shape) / cost.nbytes


def _below_ridge(intensity: float) -> dict[str, bool]:
    """Return for each GPU whether the vector units' ridge is above an intensity."""
    gpus = [gpu for gpu in specs.all_specs() if "fp32" in gpu.tflops]
    return {gpu.key: intensity < (gpu.ridge("fp32") or 0) for gpu in gpus}


@claim(
    "elementwise-memory-bound",
    "An elementwise GELU is bound by memory bandwidth on every data-centre GPU.",
    ROOFLINE,
    argument="20 FLOPs an element over 4 bytes (bf16 read and written) against the ridge of the fp32 units",
    expected=TRUE,
)
def gelu_is_memory_bound() -> Evidence:
    intensity = _intensity("gelu", GELU_FLOPS)
    ridges = [gpu.ridge("fp32") or 0 for gpu in specs.all_specs() if "fp32" in gpu.tflops]
    figures = {"FLOPs a byte of GELU": intensity, "lowest ridge of the table": min(ridges)}
    return Evidence(_below_ridge(intensity), figures)


@claim(
    "layer-norm-compute-bound",
    "Layer norm is limited by its arithmetic, since it computes a mean, a variance and a root.",
    COMMON,
    argument="10 FLOPs an element over 4 bytes against the ridge of the fp32 units; and the measured share "
    "of the bandwidth limit",
    expected=FALSE,
)
def layer_norm_is_compute_bound() -> Evidence:
    intensity = _intensity("layer_norm", NORM_FLOPS)
    return Evidence(
        {name: not below for name, below in _below_ridge(intensity).items()},
        {"FLOPs a byte": intensity},
    )


@claim(
    "softmax-three-passes",
    "A stable softmax must read its input three times: for the maximum, the sum and the result.",
    COMMON,
    argument="Three reads and one write take at least twice the time of one read and one write. The "
    "measured kernels come closer to the latter.",
    expected=FALSE,
)
def softmax_needs_three_passes() -> Evidence:
    case = registry.operator("softmax").case("bf16-32768x4096")
    cost = operator_cost("softmax", case, "forward")
    fill = record(f"{MEASURED}/device.json")["ceilings"]
    one_read = cost.nbytes / fill["copy"] * 1e6
    three_reads = (3 * cost.read + cost.written) / fill["read"] * 1e6
    times = {name: cold_us("softmax", case.name, name) for name in ("cuda", "triton")}
    settings = {f"rows of 4096, {name} on the measured GPU": us >= three_reads for name, us in times.items()}
    figures = {"us, one read and one write": one_read, "us, three reads and one write": three_reads}
    return Evidence(settings, figures | {f"us, {name}": us for name, us in times.items()})


class _CountedRow:
    """A row of numbers in memory that counts its accesses."""

    def __init__(self, values: list[float]) -> None:
        self.values, self.accesses = values, 0

    def load(self, index: int) -> float:
        self.accesses += 1
        return self.values[index]

    def store(self, index: int, value: float) -> None:
        self.accesses += 1
        self.values[index] = value


def _softmax_accesses(*, online: bool, n: int = 64) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return accesses an element, the result, and the exact result."""
    x = torch.linspace(-30, 90, n, dtype=torch.float64)
    row, result = _CountedRow(x.tolist()), _CountedRow([0.0] * n)
    maximum, total = -math.inf, 0.0
    if online:
        for i in range(n):
            value = row.load(i)
            larger = max(maximum, value)
            total = total * math.exp(maximum - larger) + math.exp(value - larger)
            maximum = larger
    else:
        for i in range(n):
            maximum = max(maximum, row.load(i))
        for i in range(n):
            total += math.exp(row.load(i) - maximum)
    for i in range(n):
        result.store(i, math.exp(row.load(i) - maximum) / total)
    accesses = (row.accesses + result.accesses) / n
    return accesses, torch.tensor(result.values, dtype=torch.float64), torch.softmax(x, 0)


@claim(
    "online-softmax-four-to-three",
    "The online form of softmax reduces memory accesses from four to three an element, with the same result.",
    ONLINE,
    argument="Accesses of both forms, counted; the online form rescales the sum when the maximum grows",
    expected=TRUE,
)
def online_softmax_saves_a_pass() -> Evidence:
    safe, _, _ = _softmax_accesses(online=False)
    online, result, exact = _softmax_accesses(online=True)
    same = torch.allclose(result, exact, rtol=1e-13, atol=0)
    settings = {"rows that do not fit on the chip": (safe, online) == (4.0, 3.0) and same}
    return Evidence(settings, {"accesses, safe": safe, "accesses, online": online, "ratio": safe / online})


@claim(
    "datasheet-bandwidth-reached",
    "A good kernel reaches the memory bandwidth of the datasheet.",
    COMMON,
    argument="The highest measured rates of copy, read and fill over the datasheet's bandwidth",
    expected=FALSE,
)
def datasheet_bandwidth_is_reached() -> Evidence:
    ceilings = record(f"{MEASURED}/device.json")["ceilings"]
    peak = specs.one("h200").bandwidth
    shares = {name: ceilings[name] / peak for name in ("copy", "read", "fill")}
    figures = {f"{name}, share of the datasheet": share for name, share in shares.items()}
    return Evidence({name: share >= 0.99 for name, share in shares.items()}, figures)


@claim(
    "l2-ten-times-dram",
    "The L2 cache has ten times the bandwidth of device memory.",
    COMMON,
    argument="Measured read bandwidth of all SMs on both plateaus",
    expected=FALSE,
)
def l2_has_ten_times_the_bandwidth() -> Evidence:
    l2, dram = plateaus("read_all")
    figures = {"TB/s from L2": l2 / 1e12, "TB/s from memory": dram / 1e12, "ratio": l2 / dram}
    return Evidence({"reads by all SMs of the measured GPU": l2 >= 10 * dram}, figures)


@claim(
    "shared-memory-latency-100x",
    "Shared memory has about a hundredth of the latency of uncached global memory.",
    SHARED_MEMORY,
    argument="Measured cycles of dependent loads",
    expected=FALSE,
)
def shared_memory_is_a_hundred_times_faster() -> Evidence:
    (shared,), dram = plateaus("chase_shared"), plateaus("chase_l1")[-1]
    figures = {"cycles, shared memory": shared, "cycles, device memory": dram, "ratio": dram / shared}
    return Evidence({"the measured GPU, within a factor of two": dram / shared >= 50}, figures)


@claim(
    "global-latency-400-800",
    "A global load takes 400 to 800 cycles.",
    BEST_PRACTICES,
    argument="Measured cycles of dependent loads beyond the L2, and within it",
    expected=DEPENDS,
)
def global_loads_take_400_to_800_cycles() -> Evidence:
    cycles = dict(zip(("L1", "near L2", "far L2", "memory"), plateaus("chase_l1"), strict=True))
    settings = {f"a load that hits {level}": 400 <= value <= 800 for level, value in cycles.items()}
    return Evidence(settings, {f"cycles, {level}": value for level, value in cycles.items()})


@claim(
    "l1-as-fast-as-shared",
    "An L1 hit is as fast as shared memory, since both are the same memory.",
    COMMON,
    argument="Measured cycles of dependent loads, and bytes a cycle and SM",
    expected=DEPENDS,
)
def l1_is_as_fast_as_shared_memory() -> Evidence:
    l1, (shared,) = plateaus("chase_l1")[0], plateaus("chase_shared")
    l1_bytes, (shared_bytes,) = plateaus("read_l1")[0], plateaus("read_shared")
    settings = {
        "latency, within 10 %": l1 <= 1.1 * shared,
        "bandwidth, within 10 %": l1_bytes >= 0.9 * shared_bytes,
    }
    figures = {"cycles, L1": l1, "cycles, shared": shared}
    return Evidence(
        settings, figures | {"bytes a cycle, L1": l1_bytes, "bytes a cycle, shared": shared_bytes}
    )


@claim(
    "uncoalesced-eight-times",
    "Loads of 4 bytes at a large stride can make a memory-bound kernel about eight times slower.",
    BEST_PRACTICES,
    argument="A sector has 32 bytes, of which such a load uses 4; and the measured ratio of two kernels",
    expected=TRUE,
)
def strided_loads_cost_eight_times() -> Evidence:
    sectors = [len({(lane * stride * 4) // SECTOR for lane in range(32)}) for stride in (1, 1024)]
    by_bytes, measured = sectors[1] * SECTOR / (32 * 4), demo_ratio("coalescing")
    settings = {"sectors": by_bytes == 8.0, "measured, within a quarter": 6 <= measured <= 10}
    return Evidence(settings, {"bytes moved / used": by_bytes, "measured ratio": measured})


@claim(
    "bank-conflict-32-times",
    "A 32-way bank conflict makes a kernel 32 times slower.",
    COMMON,
    argument="Cycles of a warp's access by the banks of its addresses; and the measured time of the whole "
    "kernel",
    expected=DEPENDS,
)
def bank_conflicts_cost_32_times() -> Evidence:
    def cycles(width: int) -> int:
        banks = [lane * width % 32 for lane in range(32)]
        return max(banks.count(bank) for bank in set(banks))

    access, kernel = cycles(32) / cycles(33), demo_ratio("bank-conflicts")
    settings = {"the access itself": access >= 30, "a kernel that also reads device memory": kernel >= 30}
    return Evidence(settings, {"cycles ratio of the access": access, "measured ratio of the kernels": kernel})


def bytes_in_flight(threads: int) -> float:
    """Return the bytes that each thread of an SM must have in flight for full bandwidth (Little's law).

    Latency and bandwidth are the measured ones.
    """
    hierarchy = record(f"{MEASURED}/hierarchy.json")
    latency = plateaus("chase_l1")[-1] / (hierarchy["device"]["clock_max_mhz"] * 1e6)
    bandwidth = plateaus("read_all")[-1]
    return latency * bandwidth / hierarchy["device"]["units"] / threads


@claim(
    "float4-helps-relu",
    "Loads of 16 bytes make an elementwise kernel such as ReLU faster.",
    VECTORS,
    argument="Little's law: latency times bandwidth must be in flight. With 2048 threads an SM, a thread "
    "needs about 6 bytes; more bring nothing.",
    expected=DEPENDS,
)
def wide_loads_help_relu() -> Evidence:
    needed = bytes_in_flight(2048)
    loads = {
        "one byte a thread": 1,
        "one bf16 a thread": 2,
        "one fp32 a thread": 4,
        "two independent fp32 a thread": 8,
        "four independent fp32 a thread": 16,
    }
    figures = {
        "bytes in flight that a thread needs": needed,
        "measured gain, one byte": demo_ratio("vectorised-loads"),
    }
    return Evidence({name: nbytes < needed for name, nbytes in loads.items()}, figures)


@claim(
    "in-place-halves-traffic",
    "An activation in place halves the memory traffic.",
    COMMON,
    argument="In place or not, each element is read once and written once; only the footprint halves",
    expected=FALSE,
)
def in_place_halves_the_traffic() -> Evidence:
    def relu(source: _CountedRow, target: _CountedRow) -> int:
        for i in range(len(source.values)):
            target.store(i, max(source.load(i), 0.0))
        return source.accesses + (target.accesses if target is not source else 0)

    values = torch.linspace(-1, 1, 64).tolist()
    row = _CountedRow(list(values))
    ratio = relu(_CountedRow(list(values)), _CountedRow([0.0] * 64)) / relu(row, row)
    return Evidence({"tensors beyond the L2": ratio >= 2}, {"accesses out of place / in place": ratio})


@claim(
    "bf16-halves-elementwise-time",
    "bf16 instead of fp32 halves the time of an elementwise kernel.",
    COMMON,
    argument="Bytes of the cost model, and measured times of GELU and of a sum",
    expected=TRUE,
)
def bf16_halves_the_time() -> Evidence:
    ratios = {
        "gelu of 2^28 elements": cold_us("gelu", "fp32-16384x16384", "cuda")
        / cold_us("gelu", "bf16-16384x16384", "cuda"),
        "sum of 2^28 elements": cold_us("sum", "fp32-2^28", "cuda") / cold_us("sum", "bf16-2^28", "cuda"),
    }
    return Evidence(
        {name: ratio >= 1.9 for name, ratio in ratios.items()}, {f"ratio, {n}": r for n, r in ratios.items()}
    )


@claim(
    "warm-equals-cold",
    "It does not matter whether the caches are cold when a kernel is timed.",
    COMMON,
    argument="Measured warm and cold times where the tensors fit into the L2, and where they do not",
    expected=DEPENDS,
)
def warm_times_equal_cold_times() -> Evidence:
    cases = {"6 MB, less than the L2": "bf16-1024x3072", "1 GB, more than the L2": "bf16-16384x16384"}
    ratios = {
        name: cold_us("gelu", case, "cuda") / warm_us("gelu", case, "cuda") for name, case in cases.items()
    }
    return Evidence(
        {name: ratio < 1.03 for name, ratio in ratios.items()},
        {f"cold / warm, {name}": ratio for name, ratio in ratios.items()},
    )


@claim(
    "matmul-compute-bound",
    "Matrix products are compute-bound.",
    COMMON,
    argument="Arithmetic intensity of the cost model against the ridge of {h100_sxm} in bf16",
    expected=DEPENDS,
)
def products_are_compute_bound() -> Evidence:
    ridge = specs.one("h100-sxm").ridge("bf16") or 0
    shapes = ((8192, 8192, 8192), (1024, 1024, 1024), (512, 512, 512), (16, 8192, 8192), (1, 8192, 8192))
    settings, figures = {}, {"ridge": ridge}
    for shape in shapes:
        cost = operator_cost("matmul", build_case("matmul", shape, "bfloat16"), "forward")
        name = "x".join(map(str, shape))
        settings[name] = cost.flops / cost.nbytes > ridge
        figures[f"FLOPs a byte, {name}"] = cost.flops / cost.nbytes
    return Evidence(settings, figures)


@claim(
    "managed-memory-prefetch",
    "Prefetching managed memory gains nothing, because the driver moves pages on demand.",
    COMMON,
    argument="Measured time of a kernel whose pages come by faults, over one whose pages were prefetched",
    expected=FALSE,
)
def prefetching_gains_nothing() -> Evidence:
    ratio = demo_ratio("unified-memory")
    return Evidence({"pages on the host": ratio < 1.1}, {"time by faults / by prefetch": ratio})


@claim(
    "ridge-rises",
    "With each generation of GPUs, the ridge point of 16-bit products rises.",
    COMMON,
    argument="Ridge points of the table, generation by generation",
    expected=DEPENDS,
)
def ridge_points_rise() -> Evidence:
    order = ("v100-sxm2", "a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm", "h200", "b200")
    ridges = {key: specs.one(key).ridge("fp16") or 0 for key in order}
    pairs = list(pairwise(order))
    return Evidence(
        {f"{old} to {new}": ridges[new] > ridges[old] for old, new in pairs},
        {f"ridge, {key}": ridge for key, ridge in ridges.items()},
    )
