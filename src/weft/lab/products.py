"""Products on tensor cores: each configuration of Weft's kernels beside ``torch.mm``, in turn.

    python3 -m weft.lab.products > results/<device>/matmul-products-<date>.txt

Four parts. ``wide`` times the configurations of the wgmma kernel (tile width, blocks in a cluster, parts of
K); the model in ops/_common/products/wgmma.py is fitted to its figures. ``few-rows`` times products of 1 to
64 rows against the weights of a Llama 8B and two squares. ``tf32`` times float32 products in three orders of
storage, and ``odd`` products whose sizes are no multiple of 8 beside those that are padded to one. The last
two parts check each result before it is timed.

Calls are in a CUDA graph, without gaps between them. The graphs of all contenders are replayed forwards and
then backwards in each round; a figure is the median in microseconds a call. Weights are rotated, so that
together they are at least three times the L2 cache where one product reads less than that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from weft import machine
from weft.core import WeftError
from weft.ops._common.cublas import call_at_precision
from weft.ops._common.layout import dtype_name
from weft.ops._common.products import skinny, wgmma

Call = Callable[[int], Any]  # the argument numbers the calls of a graph
DTYPE = torch.bfloat16
# m, n, k, and whether a and b are contiguous along K. The last two are gradients of weights, of 16384 tokens.
WIDE_SIZES = (
    (8192, 8192, 8192, True, False),
    (4096, 4096, 4096, True, False),
    (16384, 3072, 768, True, True),
    (2048, 2048, 2048, True, False),
    (1024, 1024, 1024, True, False),
    (512, 4096, 4096, True, True),
    (128, 4096, 14336, True, True),
    (768, 768, 16384, False, False),
    (768, 3072, 16384, False, False),
)
MOST_DIVIDED = 1 << 22  # elements of c: parts of K are timed up to this size
# n, k of weights (N, K): a Llama 8B's products for queries, keys and values, the attention's output, gate and
# up, down, and the vocabulary; then squares.
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
WEIGHTS = (*LLAMA_8B, (14336, 4096), (8192, 8192), (2048, 2048))
ROWS = (1, 2, 4, 8, 16, 32, 64)
# Storage of a and b: k is contiguous along K, m and n across it.
TF32_SIZES = tuple((size, size, size, order) for size in (8192, 4096, 2048) for order in ("kn", "kk", "mn"))
# The last is the product of the vocabulary in GPT-2.
ODD_SIZES = (
    (4095, 4095, 4095, "kn"),
    (4095, 4095, 4095, "kk"),
    (4095, 4095, 4095, "mn"),
    (4097, 4097, 4097, "kn"),
    (2047, 4099, 1001, "kn"),
    (8191, 3071, 769, "kn"),
    (16384, 50257, 768, "kk"),
)
FEW_ODD_SIZES = (ODD_SIZES[0], ODD_SIZES[-1])  # of float16
CHECKED_ROWS = 64
ROUNDS, GRAPH_US = 3, 3000.0  # a graph lasts about so long


def graph_times(calls: Sequence[Call], count: int) -> list[float]:
    """Return microseconds a call of each contender: ``count`` calls in a graph, in turn, medians."""
    graphs = []
    for call in calls:
        call(0)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(count):
                call(i)
        graphs.append(graph)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: list[list[float]] = [[] for _ in calls]
    order = [*range(len(calls)), *reversed(range(len(calls)))]
    for contender in order * ROUNDS:
        graphs[contender].replay()  # the same state of the caches for each
        begin.record()
        graphs[contender].replay()
        end.record()
        end.synchronize()
        times[contender].append(begin.elapsed_time(end) * 1e3 / count)
    return [statistics.median(t) for t in times]


def matrix(rows: int, columns: int, by_rows: bool, device: str, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """Return a normal (rows, columns) matrix that is contiguous along its rows or its columns."""
    x = torch.randn((rows, columns) if by_rows else (columns, rows), device=device).to(dtype)
    return x if by_rows else x.t()


def stored(m: int, n: int, k: int, order: str, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return a (M, K) and b (K, N) in an order of storage."""
    return [
        matrix(m, k, order[0] == "k", device, dtype),
        matrix(k, n, order[1] == "n", device, dtype),
    ]


def error(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest error in some rows of a product, among them the last; up to 0.6 is right.

    The unit is that of one rounding of the exact product of what tensor cores multiply (float32 without the
    last 13 bits of its mantissa), and 2^-20 for each term, of whose sum they cut off the last bits.
    """
    m = a.shape[0]
    rows = torch.cat(
        [torch.randperm(m, device=a.device)[:CHECKED_ROWS], torch.arange(max(0, m - 8), m).to(a.device)]
    )
    a = a[rows].contiguous()
    if a.dtype == torch.float32:
        a, b = ((x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b))
    exact, terms = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    unit = torch.finfo(c.dtype).eps * exact.abs() + 2.0**-20 * terms
    return float(((c[rows].double() - exact).abs() / unit).nan_to_num(1e9).max())


def padded(*sizes: int) -> tuple[int, ...]:
    """Return the next multiples of 8."""
    return tuple(-(-size // 8) * 8 for size in sizes)


def compile_programs(sizes: Sequence[tuple[int, int, int, str]], dtype: torch.dtype, device: str) -> int:
    """Compile the programs of products and of their padded neighbours together; return how many they are."""
    sources = set()
    for m, n, k, order in sizes:
        for size in ((m, n, k), padded(m, n, k)):
            a, b = stored(size[0], size[1], size[2], order, device, dtype)
            sources.add(wgmma.chosen_source(a, b))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda source: source.compile(f"sm_{wgmma.ARCH}a"), sources))
    return len(sources)


def by_copies(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of padded copies, for comparison: what rows at multiples of 16 bytes would cost."""
    (m, k), n = a.shape, b.shape[1]
    padded_a = torch.nn.functional.pad(a, (0, -k % 8, 0, -m % 8))
    padded_b = torch.nn.functional.pad(b, (0, -n % 8, 0, -k % 8))
    return wgmma.forward(padded_a, padded_b)[:m, :n].contiguous()


def checked_times(pairs: Sequence[Sequence[torch.Tensor]], *others: Call) -> list[float] | str:
    """Return microseconds of Weft's and of PyTorch's product for each pair, then of other calls.

    If a product of Weft's is wrong, return a text that says so.
    """
    calls: list[Call] = []
    for a, b in pairs:
        if (largest := error(wgmma.forward(a, b), a, b)) >= 0.6:
            return f"wrong, the largest error is {largest:.3g} (< 0.6): not timed"
        precision = "tf32" if a.dtype == torch.float32 else "ieee"
        calls.append(lambda i, a=a, b=b: wgmma.forward(a, b))  # type: ignore[misc]
        calls.append(lambda i, a=a, b=b, p=precision: call_at_precision(torch.mm, a, p, a, b))  # type: ignore[misc]
    a, b = pairs[0]
    rate = 300 if a.dtype == torch.float32 else 600  # TFLOP/s, about
    us = 2e-6 * a.shape[0] * b.shape[1] * a.shape[1] / rate
    return graph_times([*calls, *others], max(2, min(100, int(GRAPH_US / us))))


def tf32_lines(
    device: str = "cuda", sizes: Sequence[tuple[int, int, int, str]] = TF32_SIZES
) -> Iterator[str]:
    """Yield one line a size and order of storage."""
    yield "tf32 m n k order: us by weft, us by torch.mm, torch / weft, TFLOP/s of weft"
    for m, n, k, order in sizes:
        a, b = stored(m, n, k, order, device, torch.float32)
        times = checked_times([(a, b)])
        if not isinstance(times, str):
            us, library_us = times
            times = f"{us:.1f} {library_us:.1f} {library_us / us:.3f} {2e-6 * m * n * k / us:.0f}"
        yield f"tf32 {m} {n} {k} {order}: {times}"


def odd_lines(
    device: str = "cuda",
    sizes: Sequence[tuple[int, int, int, str]] = ODD_SIZES,
    dtype: torch.dtype = DTYPE,
) -> Iterator[str]:
    """Yield one line a size: its product, and that of the next multiples of 8."""
    name = dtype_name(dtype)
    yield f"{name} m n k order: us by weft, by torch.mm, both padded, by copies; weft / padded, torch / weft"
    for m, n, k, order in sizes:
        next_m, next_n, next_k = padded(m, n, k)
        pairs = [
            stored(m, n, k, order, device, dtype),
            stored(next_m, next_n, next_k, order, device, dtype),
        ]
        a, b = pairs[0]
        times = checked_times(pairs, lambda i, a=a, b=b: by_copies(a, b))  # type: ignore[misc]
        if not isinstance(times, str):
            us, library_us, padded_us, *_ = times
            ratios = f"{us / padded_us:.3f} {library_us / us:.3f}"
            times = f"{' '.join(f'{t:.1f}' for t in times)} {ratios}"
        yield f"{name} {m} {n} {k} {order}: {times}"


def wide_options(m: int, n: int, k: int) -> dict[str, tuple[wgmma.Config, int]]:
    """Return the configurations and parts of K that are timed at a size, by a short name."""
    options = {f"{c.columns}c{c.cluster}": (c, 1) for c in wgmma.CANDIDATES}
    if m * n <= MOST_DIVIDED and k >= 2048:
        options |= {
            f"{c.columns}c{c.cluster}s{splits}": (c, splits)
            for c in wgmma.CANDIDATES
            if c.columns in (128, 256)
            for splits in (2, 4, 8)
        }
    return options


def wide_lines(
    device: str = "cuda", sizes: Sequence[tuple[int, int, int, bool, bool]] = WIDE_SIZES
) -> Iterator[str]:
    """Yield one line a size: what the model chooses, and the times of all contenders."""
    for m, n, k, a_by_k, b_by_k in sizes:
        a, b = matrix(m, k, a_by_k, device), matrix(k, n, not b_by_k, device)
        chosen, splits = wgmma.choose(a, b)
        options = wide_options(m, n, k)
        calls: list[Call] = [lambda i, a=a, b=b: torch.mm(a, b)]  # type: ignore[misc]
        for config, parts in options.values():
            calls.append(lambda i, a=a, b=b, c=config, s=parts: wgmma.forward_with(c, a, b, s))  # type: ignore[misc]
        us = 2e-6 * m * n * k / 600  # at 600 TFLOP/s
        times = graph_times(calls, max(2, min(100, int(GRAPH_US / us))))
        figures = {name: round(t, 1) for name, t in zip(("torch", *options), times, strict=True)}
        best = min(figures, key=lambda name: figures[name])
        rates = (
            f"torch {2e-6 * m * n * k / figures['torch']:.0f}, {best} {2e-6 * m * n * k / figures[best]:.0f}"
        )
        yield f"{m} {n} {k} chosen {chosen.columns}c{chosen.cluster}s{splits} {figures} TFLOP/s: {rates}"


def few_rows_lines(
    device: str = "cuda",
    weights: Sequence[tuple[int, int]] = WEIGHTS,
    rows: Sequence[int] = ROWS,
    l2_bytes: int = 50 << 20,
) -> Iterator[str]:
    """Yield one line for each weight and number of rows, and the geometric mean over a Llama 8B's."""
    ratios = []
    yield "n k m: us by weft, us by torch.mm, torch / weft, TB/s of the weight by weft"
    for n, k in weights:
        bytes_read = n * k * DTYPE.itemsize
        ws = [matrix(n, k, True, device).t() for _ in range(max(1, -(-3 * l2_bytes // bytes_read)))]
        count = -(-int(max(1.0, min(100.0, GRAPH_US * 4e6 / bytes_read))) // len(ws)) * len(ws)
        for m in rows:
            x = matrix(m, k, True, device)
            ours: Call = lambda i, x=x, ws=ws: skinny.forward(x, ws[i % len(ws)])  # type: ignore[misc]  # noqa: E731
            library: Call = lambda i, x=x, ws=ws: torch.mm(x, ws[i % len(ws)])  # type: ignore[misc]  # noqa: E731
            us, library_us = graph_times([ours, library], count)
            if (n, k) in LLAMA_8B:
                ratios.append(library_us / us)
            yield f"{n} {k} {m}: {us:.1f} {library_us:.1f} {library_us / us:.2f} {bytes_read * 1e-6 / us:.2f}"
    if ratios:
        mean = statistics.geometric_mean(ratios)
        yield f"geometric mean of torch / weft, a Llama 8B's products: {mean:.3f}"


PARTS = ("wide", "few-rows", "tf32", "odd")


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 2 without a GPU that the kernels run on."""
    parser = argparse.ArgumentParser(
        prog="python3 -m weft.lab.products",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="?", choices=PARTS, help="one of the parts; all without it")
    part = parser.parse_args(arguments).part
    try:
        if not machine.has_gpu():
            raise WeftError("the times of products", expected="an NVIDIA GPU", got="none")
        if part not in (None, "few-rows") and torch.cuda.get_device_capability() != (9, 0):
            raise WeftError("the wgmma products", expected="compute capability 9.0", got="another")
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, torch {torch.__version__}, us a call")
    has_wgmma = torch.cuda.get_device_capability() == (9, 0)
    parts = (part,) if part else PARTS if has_wgmma else ("few-rows",)
    if "wide" in parts:
        for config in (c for c in wgmma.CANDIDATES if c.cluster > 1):
            kernel = wgmma.source(DTYPE, config, True, False)["matmul_wgmma"]
            at_once = wgmma.max_clusters(kernel, config, torch.device("cuda"))
            print(f"clusters of {config.cluster} at once with {config.columns} columns: {at_once}")
    lines = {
        "wide": [wide_lines()],
        "few-rows": [few_rows_lines(l2_bytes=properties.L2_cache_size)],
        "tf32": [tf32_lines()],
        "odd": [odd_lines(), odd_lines(sizes=FEW_ODD_SIZES, dtype=torch.float16)],
    }
    if "tf32" in parts:
        compile_programs(TF32_SIZES, torch.float32, "cuda")
    if "odd" in parts:
        compile_programs(ODD_SIZES, DTYPE, "cuda")
        compile_programs(FEW_ODD_SIZES, torch.float16, "cuda")
    for line in (line for name in parts for generator in lines[name] for line in generator):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
