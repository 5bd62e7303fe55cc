"""Products by wgmma: what the choice of a configuration loses, and what limits each configuration.

    python3 -m weft.lab.product_choices > results/<device>/product-choices-<date>.txt

The parts: ``configurations`` times every configuration at a few sizes beside cuBLAS, cuBLASLt and Triton, in
one run, forwards and then backwards in each round. ``sustained`` repeats four of them at one size for a while
and reads the energy. ``counted`` counts bytes of DRAM and L2 by Nsight Compute. ``random`` times the chosen
configuration at random sizes of published models; at the worst sizes it times all configurations, so that
the loss by the choice and the loss by the kernels are told apart. ``survey`` times the configurations at
random sizes, for a fit of the choice's model. Names of configurations are those of
``weft.lab.products``.

The SM clock is the mean while a contender runs, from cycle counters (sm_clock.cu). ``B/clk`` are bytes that
the SMs receive from the L2 cache by arithmetic, a cycle of all SMs; a cluster's shared tile counts once.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft import machine
from weft.backends.nvrtc import CudaSource
from weft.core import WeftError
from weft.lab.products import DTYPE, GRAPH_US, matrix, short_name
from weft.machine.clocks import Sampler
from weft.machine.device_limits import num_sms
from weft.ops._common.products import wgmma
from weft.ops._common.products.wgmma_model import K_STEP_BYTES, LEAST_STEPS, MAX_SPLITS, NUM_SMS, Config
from weft.ops.matmul import with_cuda, with_triton
from weft.workbench.explain.ncu import find, output
from weft.workbench.explain.ncu.process import options
from weft.workbench.tuning.audit_points import model_shapes

Call = Callable[[], Any]
Size = tuple[int, int, int]  # m, n, k
Order = tuple[bool, bool]  # whether a and b are contiguous along K

# The last is the up projection of a Llama 70B's MLP for 4096 tokens.
SIZES: tuple[tuple[Size, Order], ...] = (
    ((8192, 8192, 8192), (True, False)),
    ((4096, 4096, 4096), (True, False)),
    ((16384, 3072, 768), (True, True)),
    ((2048, 2048, 2048), (True, False)),
    ((4096, 28672, 8192), (True, True)),
)
# Not among the candidates: groups that alternate, with the least bytes from L2 that they can have.
EXPERIMENT = Config(columns=192, stages=4, cluster=2, share_a=True, pingpong=True)
BANDS = (4, 16)  # rows of tiles, beside the usual 8
# Configurations that are timed with other bands, too.
BANDED = ("256c2", "256c1", "192c1p", "128c2p", "192c2ap")
LIBRARIES = ("cublas", "cublaslt", "triton")
ROUNDS = 3
SUSTAINED_S = 0.5  # of one turn of a contender
COUNTED = ("192c1p", "256c2", "256c1", "128c2p")
METRICS = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__time_duration.sum",
)
SECTOR = 32  # bytes
RANDOM_SIZES, SEED = 100, 18
LEAST_ROWS = 65  # fewer have a kernel of their own
MOST_FLOP = 1.2e12  # of a random product: a call takes at most 2 ms
MOST_ELEMENTS = 1 << 29  # of an operand or the product
ATTEMPTS = 100  # for each random product, before the models are taken to have no more
SURVEYED, SURVEY_SEED, SURVEY_FLOP, SURVEYED_SLOWNESS = 380, 777, 2.2e11, 1.5
WORST = 10
UNALIGNED = 12  # sizes that are no multiple of 8


class Timing(NamedTuple):
    """``us`` a call, and the mean SM clock while it runs in MHz (0 on a CPU)."""

    us: float
    mhz: float


@cache
def clock_source() -> CudaSource:
    """Return the program that reads the SMs' cycle counters."""
    return CudaSource(
        file=Path(__file__).with_name("sm_clock.cu"), kernels=("read_sm_clock",), label="sm_clock"
    )


def timings(calls: Sequence[Call], count: int, device: str = "cuda") -> list[Timing]:
    """Return the medians of each contender: ``count`` calls in a graph, all in turn, forwards and backwards.

    On a CPU each contender is called once.
    """
    if device == "cpu":
        return [Timing(_cpu_us(call), 0.0) for call in calls]
    sms = num_sms(torch.device(device))
    clocks = torch.zeros(2, sms, 2, dtype=torch.int64, device=device)
    graphs = []
    for call in calls:
        call()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            clock_source()["read_sm_clock"](sms * 8, 32, clocks[0])
            for _ in range(count):
                call()
            clock_source()["read_sm_clock"](sms * 8, 32, clocks[1])
        graphs.append(graph)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples: list[list[Timing]] = [[] for _ in calls]
    for contender in [*range(len(calls)), *reversed(range(len(calls)))] * ROUNDS:
        graphs[contender].replay()  # the same state of the caches and of the clock for each
        begin.record()
        graphs[contender].replay()
        end.record()
        end.synchronize()
        samples[contender].append(Timing(begin.elapsed_time(end) * 1e3 / count, mean_mhz(clocks)))
    return [Timing(*map(statistics.median, zip(*s, strict=True))) for s in samples]


def _cpu_us(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def mean_mhz(clocks: torch.Tensor) -> float:
    """Return the mean SM clock between two readings, (2, SMs, 2): the median over the SMs."""
    cycles, nanoseconds = (clocks[1] - clocks[0]).double().unbind(1)
    return float((cycles / nanoseconds).nan_to_num(0.0).median()) * 1e3


def by_library(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a b by ``cublas``, ``cublaslt`` or ``triton``."""
    if name == "triton":
        return with_triton.forward(a, b)
    if not a.is_cuda:
        return torch.mm(a, b)
    before = torch.backends.cuda.preferred_blas_library(name)
    try:
        return torch.mm(a, b)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def all_configs() -> dict[str, Config]:
    """Return the configurations that are timed, by name."""
    configs = {short_name(c): c for c in (*wgmma.CANDIDATES, EXPERIMENT)}
    banded = [replace(configs[name], band=band) for name in BANDED for band in BANDS]
    return configs | {short_name(c): c for c in banded}


def compile_all(
    configs: Iterable[Config], orders: Iterable[Order], splits: Sequence[bool] = (False,)
) -> None:
    """Compile programs for the device side by side."""
    sources = [
        wgmma.source(DTYPE, config, *order, is_split)
        for config in configs
        for order in orders
        for is_split in splits
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda source: source.compile(f"sm_{wgmma.ARCH}a"), sources))


def l2_bytes(size: Size, config: Config) -> float:
    """Return the bytes that all SMs receive from the L2 cache for a product."""
    m, n, k = size
    a_blocks, b_blocks = config.blocks
    tiles = -(-m // (config.rows * b_blocks)) * -(-n // (config.columns * a_blocks)) * config.cluster
    steps = -(-k * DTYPE.itemsize // K_STEP_BYTES)
    return tiles * steps * (config.rows / a_blocks + config.columns / b_blocks) * K_STEP_BYTES


def operands(size: Size, order: Order, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normal a (M, K) and b (K, N)."""
    m, n, k = size
    return matrix(m, k, order[0], device), matrix(k, n, not order[1], device)


def calls_of(
    names: Iterable[str], a: torch.Tensor, b: torch.Tensor, chosen: tuple[Config, int]
) -> dict[str, Call]:
    """Return the calls of libraries, of configurations by name, and of ``chosen``."""
    configs = all_configs()
    calls: dict[str, Call] = {}
    for name in names:
        if name in LIBRARIES:
            calls[name] = partial(by_library, name, a, b)
        elif name == "chosen":
            calls[name] = partial(wgmma.forward_with, chosen[0], a, b, chosen[1])
        else:
            calls[name] = partial(wgmma.forward_with, configs[name], a, b)
    return calls


def _calls_in_graph(size: Size) -> int:
    return max(2, min(100, int(GRAPH_US / (2e-6 * size[0] * size[1] * size[2] / 600))))


def configuration_lines(device: str = "cuda", sizes: Sequence[tuple[Size, Order]] = SIZES) -> Iterator[str]:
    """Yield a block of lines for each size: one for each contender, the fastest first."""
    configs = all_configs()
    if device == "cuda":
        compile_all(configs.values(), {order for _, order in sizes})
        for name in ("256c2", "128c2p", "192c2ap"):
            kernel = wgmma.source(DTYPE, configs[name], True, False)["matmul_wgmma"]
            at_once = wgmma.max_clusters(kernel, configs[name], torch.device("cuda"))
            yield f"clusters at once of {name}: {at_once}"
    for size, order in sizes:
        a, b = operands(size, order, device)
        config, splits = wgmma.choose(a, b)
        calls = calls_of((*LIBRARIES, *configs), a, b, (config, splits))
        times = dict(zip(calls, timings(list(calls.values()), _calls_in_graph(size), device), strict=True))
        m, n, k = size
        yield f"{m} {n} {k} chosen {short_name(config)}s{splits}: us, SM MHz, TFLOP/s, B/clk"
        for name, timing in sorted(times.items(), key=lambda item: item[1].us):
            cycles = timing.us * timing.mhz
            rate = f"{l2_bytes(size, configs[name]) / cycles:.0f}" if name in configs and cycles else "-"
            flops = 2e-6 * m * n * k / timing.us
            yield f"  {name:<12} {timing.us:8.1f} {timing.mhz:6.0f} {flops:5.0f} {rate:>6}"


def sustained_lines(device: str = "cuda", size: Size = SIZES[0][0]) -> Iterator[str]:
    """Yield a line for each of some contenders that run for a while, in turn: joules and clock of a call."""
    a, b = operands(size, SIZES[0][1], device)
    names = ("cublas", "triton", "chosen", "256c2", "256c1", "128c2p", "192c2ap")
    calls = calls_of(names, a, b, wgmma.choose(a, b))
    clocks = Sampler(device)
    count = 16 if device == "cuda" else 1
    turns = [*calls, *reversed(calls)]
    totals = {name: [0.0, 0.0, 0.0, 0.0] for name in calls}  # calls, seconds, joules, MHz
    for name in turns:
        begin, joules, done, mhz = time.perf_counter(), clocks.joules() or 0.0, 0, []
        while time.perf_counter() - begin < (SUSTAINED_S if device == "cuda" else 0.0) or not done:
            for _ in range(count):
                calls[name]()
            done += count
            mhz.append(clocks.read().get("sm_mhz") or 0)  # while the calls run
            if device == "cuda":
                torch.cuda.synchronize()
        seconds, joules = time.perf_counter() - begin, (clocks.joules() or 0.0) - joules
        figures = done, seconds, joules, statistics.mean(mhz) / 2
        totals[name] = [total + figure for total, figure in zip(totals[name], figures, strict=True)]
    yield "sustained: us a call, SM MHz (NVML), J a call, W"
    for name, (number, seconds, energy, mean) in totals.items():
        us, watts = seconds / number * 1e6, energy / seconds
        yield f"  {name:<12} {us:8.1f} {mean:6.0f} {energy / number:.3f} {watts:.0f}"


def counted_lines(device: str = "cuda", size: Size = SIZES[0][0]) -> Iterator[str]:
    """Yield a line for each of some configurations with bytes by Nsight Compute, which runs this module."""
    program = find.require()
    with tempfile.TemporaryDirectory(prefix="weft-ncu-") as folder:
        log = Path(folder, "log.csv")
        command = [
            str(program),
            *options(log, METRICS),
            sys.executable,
            "-m",
            __spec__.name,
            "--count",
            *map(str, size),
        ]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        counted = output.parse(log.read_text(errors="replace") if log.exists() else "")
    if not counted.rows:
        raise WeftError(
            "counted bytes of products", got="; ".join(counted.troubles) or completed.stderr[-500:]
        )
    yield "counted: DRAM GB read, written, GB from L2 by counter, by arithmetic, L2 % of its peak, us"
    configs = all_configs()
    for name, row in zip(COUNTED, (r for r in counted.rows if "matmul_wgmma" in r.name), strict=True):
        read, written, sectors, peak, nanoseconds = (row.values[metric] for metric in METRICS)
        expected = l2_bytes(size, configs[name]) * 1e-9
        yield (
            f"  {name:<12} {read * 1e-9:.2f} {written * 1e-9:.2f} {sectors * SECTOR * 1e-9:.2f} "
            f"{expected:.2f} {peak:.0f} {nanoseconds * 1e-3:.0f}"
        )


def run_counted(size: Size) -> None:
    """Call each counted configuration once, between the marks that Nsight Compute waits for."""
    a, b = operands(size, SIZES[0][1], "cuda")
    calls = calls_of(COUNTED, a, b, wgmma.choose(a, b))
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


class Problem(NamedTuple):
    """A product that a model has: a linear layer's ``forward``, or its gradients ``dx`` and ``dw``."""

    size: Size
    order: Order
    kind: str


def random_problems(count: int, seed: int) -> list[Problem]:
    """Return products of published models' linear layers, of random numbers of tokens, without repetition.

    Their rows begin at multiples of 16 bytes. Raises :class:`WeftError` if the models have too few.
    """
    rng = random.Random(seed)
    shapes = model_shapes()
    problems: dict[Problem, None] = {}
    attempts = 0
    while len(problems) < count:
        model = rng.choice(shapes["models"])
        width, mlp = model["width"], model["mlp"]
        qkv = (model["heads"] + 2 * model.get("kv_heads", model["heads"])) * model.get("head_dim", 64)
        layers = [(mlp, width), (width, mlp), (width, width), (qkv, width)]
        layers += [(model["vocab"], width)] if "vocab" in model else []
        n, k = rng.choice(layers)
        tokens = rng.choice([t for t in shapes["tokens"] if t >= LEAST_ROWS])
        kind = rng.choice(("forward", "dx", "dw"))
        size, order = {
            "forward": ((tokens, n, k), (True, True)),
            "dx": ((tokens, k, n), (True, False)),
            "dw": ((n, k, tokens), (False, False)),
        }[kind]
        is_aligned = all(x % 8 == 0 for x in size)
        elements = max(size[0] * size[1], size[1] * size[2], size[0] * size[2])
        if is_aligned and 2 * size[0] * size[1] * size[2] <= MOST_FLOP and elements <= MOST_ELEMENTS:
            problems[Problem(size, order, kind)] = None
        attempts += 1
        if attempts > ATTEMPTS * count:
            raise WeftError("random products", expected=f"{count} different ones", got=len(problems))
    return list(problems)


def survey_lines(
    device: str = "cuda", count: int = SURVEYED, seed: int = SURVEY_SEED, most_flop: float = SURVEY_FLOP
) -> Iterator[str]:
    """Yield a JSON line for each of ``count`` random products: microseconds of all that a choice may take.

    The model of the choice (wgmma_model.py) is fitted to these. Of the options that the model expects to
    take much longer than the best one, none is timed.
    """
    problems = [p for p in random_problems(count, seed) if 2 * prod(p.size) <= most_flop]
    options = {p: survey_options(p.size) for p in problems}
    if device == "cuda":
        for p, timed in options.items():
            for is_split in (False, True):
                configs = {config for config, splits in timed if (splits > 1) == is_split}
                compile_all(configs, (p.order,), (is_split,))
    for p, timed in options.items():
        a, b = operands(p.size, p.order, device)
        calls: list[Call] = [partial(wgmma.forward_with, c, a, b, splits) for c, splits in timed]
        calls += [partial(by_library, name, a, b) for name in ("cublas", "cublaslt")]
        us = [round(t.us, 2) for t in timings(calls, _calls_in_graph(p.size), device)]
        names = [f"{config.label} s{splits}" for config, splits in timed]
        sizes = dict(zip("mnk", p.size, strict=True))
        figures = dict(zip(names, us[:-2], strict=True))
        yield json.dumps({**sizes, "kind": p.kind, "libraries": us[-2:], "us": figures})


def survey_options(size: Size) -> list[tuple[Config, int]]:
    """Return configurations and parts of K that the model expects to be near the best one."""
    steps = -(-size[2] * DTYPE.itemsize // K_STEP_BYTES)
    most = max(1, min(MAX_SPLITS, steps // LEAST_STEPS))
    options = [(c, splits) for c in wgmma.CHOSEN_FROM for splits in range(1, most + 1)]
    options += [(c, 1) for c in wgmma.WITH_K_PARTS if c.k_parts <= most]
    us = {option: wgmma.estimated_us(*size, *option, NUM_SMS) for option in options}
    return [option for option in options if us[option] <= SURVEYED_SLOWNESS * min(us.values())]


def random_lines(device: str = "cuda", count: int = RANDOM_SIZES, seed: int = SEED) -> Iterator[str]:
    """Yield a line for each random product, the distribution, and the worst ones with all configurations."""
    problems = random_problems(count, seed)
    chosen = {p: wgmma.choose(*_meta_operands(p, device)) for p in problems}
    if device == "cuda":
        for p, (config, splits) in chosen.items():
            compile_all((config,), (p.order,), (splits > 1,))
    ratios: dict[Problem, float] = {}
    yield f"{count} random products, seed {seed}: us chosen, us cuBLAS, us cuBLASLt, the better / chosen"
    for p in problems:
        a, b = operands(p.size, p.order, device)
        calls = calls_of(("chosen", "cublas", "cublaslt"), a, b, chosen[p])
        ours, *libraries = (t.us for t in timings(list(calls.values()), _calls_in_graph(p.size), device))
        ratios[p] = min(libraries) / ours
        name = f"{short_name(chosen[p][0])}s{chosen[p][1]}"
        yield f"  {_title(p)} {name}: {ours:.1f} {libraries[0]:.1f} {libraries[1]:.1f} {ratios[p]:.3f}"
        del a, b, calls
    yield from distribution_lines(ratios)
    yield from worst_lines(sorted(problems, key=ratios.__getitem__)[:WORST], chosen, device)


def distribution_lines(ratios: dict[Problem, float]) -> Iterator[str]:
    """Yield the geometric mean and quantiles of the ratios, of all products and of each kind."""
    for kind in ("all", "forward", "dx", "dw"):
        values = sorted(r for p, r in ratios.items() if kind in ("all", p.kind))
        if not values:
            continue
        quantiles = " ".join(f"{values[min(len(values) - 1, int(q * len(values)))]:.2f}" for q in _QUANTILES)
        below = sum(v < 0.9 for v in values)
        yield (
            f"{kind}: {len(values)} products, geometric mean {statistics.geometric_mean(values):.3f}, "
            f"lowest, 5, 25, 50, 75, 95 %: {quantiles}; {below} below 0.9"
        )


_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95)


def worst_lines(
    problems: Sequence[Problem], chosen: dict[Problem, tuple[Config, int]], device: str
) -> Iterator[str]:
    """Yield a line for each product: what the choice loses to the best configuration, and that to cuBLAS."""
    configs = {short_name(c): c for c in wgmma.CANDIDATES}
    orders = {p.order for p in problems}
    if device == "cuda":
        compile_all(configs.values(), orders, (False, True))
        compile_all(wgmma.WITH_K_PARTS, orders)
    yield "the worst: us chosen, us best of all, us of the better library; best / chosen, library / best"
    for p in problems:
        a, b = operands(p.size, p.order, device)
        steps = -(-p.size[2] * DTYPE.itemsize // K_STEP_BYTES)
        options = {f"{name}s1": (c, 1) for name, c in configs.items()}
        options |= {f"{short_name(c)}s1": (c, 1) for c in wgmma.WITH_K_PARTS}
        # Parts of K of the tiles that do not fill all SMs.
        options |= {
            f"{name}s{splits}": (c, splits)
            for name, c in configs.items()
            for splits in (2, 3, 4, 6, 8, 11)
            if splits * 4 <= steps
        }
        own = f"{short_name(chosen[p][0])}s{chosen[p][1]}"
        options[own] = chosen[p]
        calls: dict[str, Call] = {
            name: partial(wgmma.forward_with, c, a, b, splits) for name, (c, splits) in options.items()
        }
        calls |= calls_of(("cublas", "cublaslt"), a, b, chosen[p])
        times = dict(zip(calls, timings(list(calls.values()), _calls_in_graph(p.size), device), strict=True))
        best = min(options, key=lambda name: times[name].us)
        library = min(times["cublas"].us, times["cublaslt"].us)
        ours, least = times[own].us, times[best].us
        yield (
            f"  {_title(p)} {own}: {ours:.1f}, {best} {least:.1f}, {library:.1f}; "
            f"{least / ours:.3f}, {library / least:.3f}"
        )
        del a, b, calls


def unaligned_lines(device: str = "cuda", count: int = UNALIGNED, seed: int = SEED) -> Iterator[str]:
    """Yield a line for each product whose N, K or both are 3 less than a multiple of 8."""
    ratios = []
    yield "unaligned: us by CUDA, us at the next multiples of 8, the second / the first; us by cuBLAS"
    for i, p in enumerate(random_problems(count, seed + 1)):
        m, n, k = p.size
        smaller = m, n - 3 * (i % 3 != 1), k - 3 * (i % 3 != 0)
        (a, b), (a8, b8) = operands(smaller, p.order, device), operands(p.size, p.order, device)
        calls: list[Call] = [
            partial(with_cuda.forward, a, b),
            partial(with_cuda.forward, a8, b8),
            partial(by_library, "cublas", a, b),
        ]
        ours, neighbour, library = (t.us for t in timings(calls, _calls_in_graph(p.size), device))
        ratios.append(neighbour / ours)
        yield (
            f"  {smaller[0]} {smaller[1]} {smaller[2]} {p.kind}: {ours:.1f} {neighbour:.1f} "
            f"{ratios[-1]:.3f}; {library:.1f}"
        )
        del a, b, a8, b8, calls
    yield f"geometric mean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}"


def _title(p: Problem) -> str:
    return f"{p.size[0]} {p.size[1]} {p.size[2]} {p.kind}"


def _meta_operands(p: Problem, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return operands for the choice alone, which reads sizes and the device's number of SMs."""
    m, n, k = p.size
    x = torch.empty(1, dtype=DTYPE, device=device)
    a = x.expand(m, k)
    return a, x.expand(k, n)


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "configurations": configuration_lines,
    "sustained": sustained_lines,
    "counted": counted_lines,
    "random": random_lines,
    "survey": survey_lines,
    "unaligned": unaligned_lines,
}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 2 for an unknown part, or without a GPU that the kernels run on."""
    parser = argparse.ArgumentParser(
        prog="python3 -m weft.lab.product_choices",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", help=f"parts to measure: {', '.join(PARTS)} [default: all]")
    parser.add_argument("--count", type=int, nargs=3, metavar=("M", "N", "K"), help=argparse.SUPPRESS)
    options_ = parser.parse_args(arguments)
    parts = options_.parts or list(PARTS)
    try:
        if unknown := sorted({*parts} - {*PARTS}):
            raise WeftError("the parts", expected=", ".join(PARTS), got=", ".join(unknown))
        if not machine.has_gpu():
            raise WeftError("the times of products", expected="an NVIDIA GPU", got="none")
        if torch.cuda.get_device_capability() != (9, 0):
            raise WeftError("the wgmma products", expected="compute capability 9.0", got="another")
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options_.count:
        run_counted(tuple(options_.count))
        return 0
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, L2 {properties.L2_cache_size >> 20} MiB, torch {torch.__version__}, bf16")
    for part in parts:
        begin = time.perf_counter()
        print(f"-- {part}")
        try:
            for line in PARTS[part]():
                print(line, flush=True)
        except WeftError as error:  # counting bytes needs a tool and a permission
            print(f"{part}: {error}")
        print(f"({part}: {time.perf_counter() - begin:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
