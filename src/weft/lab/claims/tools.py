"""Claims about tools: compilers of graphs, clocks, launches, libraries, and what a speed-up is worth."""

from __future__ import annotations

import time

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
    host_us,
    record,
)

CUDA_SEMANTICS = Source("PyTorch", "CUDA semantics", 2025, "https://pytorch.org/docs/stable/notes/cuda.html")
AMDAHL = Source(
    "Gene Amdahl",
    "Validity of the single processor approach to achieving large scale computing capabilities",
    1967,
    "https://doi.org/10.1145/1465482.1465560",
)


@claim(
    "compile-fuses-everything",
    "torch.compile fuses a function into one kernel.",
    COMMON,
    argument="Kernels and library calls in the code that Inductor generates for a CPU",
    expected=DEPENDS,
)
def compile_fuses_everything() -> Evidence:
    counts = record("inductor/fusion.json")["functions"]
    launches = {name: c["kernels"] + c["library_calls"] for name, c in counts.items()}
    return Evidence(
        {name: count == 1 for name, count in launches.items()},
        {f"kernels and calls, {name}": count for name, count in launches.items()},
    )


@claim(
    "clock-without-synchronisation",
    "Two calls of time.time() around an operation measure its time on the GPU, within 10 %.",
    CUDA_SEMANTICS,
    argument="The call returns when the kernel is queued: recorded host time of a call over the kernel's "
    "time",
    expected=FALSE,
)
def host_clock_measures_kernels() -> Evidence:
    settings, figures = {}, {}
    for case in ("bf16-16384x16384", "bf16-1024x3072"):
        ratio = host_us("gelu", case, "cuda") / cold_us("gelu", case, "cuda")
        settings[f"gelu {case}"], figures[f"host / GPU time, {case}"] = abs(ratio - 1) < 0.1, ratio
    return Evidence(settings, figures)


@claim(
    "wall-clock-monotonic",
    "time.time() is a suitable clock for short intervals on a CPU.",
    COMMON,
    argument="Properties of Python's clocks: a clock that the system may set back can give a negative "
    "interval",
    expected=FALSE,
)
def wall_clock_is_suitable() -> Evidence:
    wall, counter = time.get_clock_info("time"), time.get_clock_info("perf_counter")
    figures = {"resolution of time, s": wall.resolution, "resolution of perf_counter, s": counter.resolution}
    return Evidence({"it never goes back": wall.monotonic and not wall.adjustable}, figures)


@claim(
    "launch-five-us",
    "Calling an operator costs the host about five microseconds.",
    COMMON,
    argument="Recorded host times of calls on 64 x 1024 elements: ATen's function, with dispatch, and with "
    "a gradient; 'about' means up to 10 us",
    expected=FALSE,
)
def a_call_costs_five_us() -> Evidence:
    data = record(f"{MEASURED}/host-time.json")
    settings, figures = {}, {}
    for what, key in (("without gradient", "us"), ("with gradient", "forward_us")):
        for name in ("gelu", "attention"):
            us = data[key][name]["aten"]
            settings[f"{name} {what}"], figures[f"us, {name} {what}"] = us <= 10, us
    return Evidence(settings, figures)


@claim(
    "cuda-graphs-always-help",
    "A CUDA graph makes a program at least 10 % faster.",
    COMMON,
    argument="Measured: 100 small launches one by one over one graph of them; and a training step of GPT-2 "
    "124M without and with a graph",
    expected=DEPENDS,
)
def cuda_graphs_always_help() -> Evidence:
    runs = record(f"{MEASURED}/step-times.json")["runs"]
    ratios = {
        "100 small kernels": demo_ratio("launch-overhead"),
        "a training step with 64 sequences": runs["e64"]["wall"] / runs["g64"]["wall"],
    }
    return Evidence(
        {name: ratio >= 1.1 for name, ratio in ratios.items()},
        {f"time without / with graph, {name}": ratio for name, ratio in ratios.items()},
    )


@claim(
    "products-reach-datasheet",
    "Large products reach the datasheet's rate.",
    COMMON,
    argument="Highest measured rates of products over the datasheet's: the power limit lowers the clock",
    expected=FALSE,
)
def products_reach_the_datasheet() -> Evidence:
    device = record(f"{MEASURED}/device.json")
    peaks, rates = device["datasheet"]["matrix"], device["ceilings"]["matrix"]
    shares = {name: rate / peaks[name] for name, rate in rates.items() if name in peaks}
    return Evidence(
        {name: share >= 0.95 for name, share in shares.items()},
        {f"share, {name}": share for name, share in shares.items()},
    )


@claim(
    "own-kernel-faster",
    "A kernel of one's own is faster than PyTorch's, by at least a tenth.",
    COMMON,
    argument="Recorded times of torch's operators over Weft's CUDA kernels",
    expected=DEPENDS,
)
def own_kernels_are_faster() -> Evidence:
    points = (
        ("gelu", "fp32-16384x16384"),
        ("bias_gelu", "bf16-16384x16384"),
        ("softmax", "bf16-32768x4096"),
        ("sum", "fp32-2^28"),
        ("cross_entropy", "bf16-8192x50304-8192"),
    )
    settings, figures = {}, {}
    for operator, case in points:
        ratio = cold_us(operator, case, "torch") / cold_us(operator, case, "cuda")
        settings[f"{operator} {case}"], figures[f"torch / cuda, {operator}"] = ratio >= 1.1, ratio
    return Evidence(settings, figures)


@claim(
    "twice-as-fast-kernel",
    "A kernel that is twice as fast makes the program 10 % faster.",
    AMDAHL,
    argument="1 / (1 - s + s / 2) for a kernel with the share s of the time",
    expected=DEPENDS,
)
def twice_as_fast_kernel_helps() -> Evidence:
    gains = {share: 1 / (1 - share + share / 2) for share in (0.05, 0.1, 0.2, 0.5)}
    return Evidence(
        {f"{100 * share:g} % of the time": gain >= 1.1 for share, gain in gains.items()},
        {f"speed-up, {100 * share:g} % of the time": gain for share, gain in gains.items()},
    )


@claim(
    "wide-loads-measured",
    "A sum of floats gains at least a third from vectorised loads and a grid-stride loop.",
    COMMON,
    argument="Recorded times of two steps of the sum's ladder, at 2^28 and at 2^20 elements",
    expected=DEPENDS,
)
def wide_loads_speed_up_sums() -> Evidence:
    ratios = {
        case: cold_us("sum", case, "cuda/04-warp-shuffle")
        / cold_us("sum", case, "cuda/05-vectorised-grid-stride")
        for case in ("fp32-2^28", "fp32-2^20")
    }
    return Evidence({c: r >= 4 / 3 for c, r in ratios.items()}, {f"ratio, {c}": r for c, r in ratios.items()})


@claim(
    "adamw-fused",
    "A fused AdamW step is at least three times as fast as one in separate operations.",
    COMMON,
    argument="Recorded times of the eager step over the fused kernel, with the copies that both need",
    expected=TRUE,
)
def fused_adamw_is_three_times_as_fast() -> Evidence:
    ratio = cold_us("adamw", "fp32-124m", "eager") / cold_us("adamw", "fp32-124m", "cuda")
    return Evidence({"124M parameters in float32": ratio >= 3}, {"eager / fused": ratio})
