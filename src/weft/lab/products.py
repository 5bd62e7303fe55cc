"""Products on tensor cores: each configuration of Weft's kernels beside ``torch.mm``, in turn.

    python3 -m weft.lab.products > results/<device>/matmul-products-<date>.txt

The parts: ``wide`` times the configurations of the wgmma kernel (tile width, blocks in a cluster, groups that
alternate, parts of K); the model in ops/_common/products/wgmma.py is fitted to its figures. ``few-rows``
times products of 1 to 64 rows against the weights of a Llama 8B and two squares, ``invariant`` those that are
batch invariant. ``linear`` times linear layers with their epilogues against torch's, ``fp8`` products of
float8 against ``torch._scaled_mm`` with and without its fast sums. ``tf32`` times float32 products in three
orders of storage, and checks each result before it is timed.

Names of configurations: rows of a tile and ``x`` where they are not 128, its columns, ``c`` and blocks of a
cluster, ``a`` if they share a, ``p`` if warp groups alternate, ``b`` and the rows of tiles in a band where
they are not 8, ``k`` and parts of K in a cluster, ``s`` and parts of K of the last tiles; for fp8 ``d`` if
there are two sets of sums.

Calls are in a CUDA graph, without gaps between them. The graphs of all contenders are replayed forwards and
then backwards in each round; a figure is the median in microseconds a call. Weights are rotated, so that
together they are at least three times the L2 cache where one product reads less than that.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from weft import machine
from weft.core import WeftError
from weft.ops._common.cublas import call_at_precision
from weft.ops._common.products import invariant, skinny, wgmma
from weft.ops.matmul import with_cuda
from weft.ops.scaled_matmul import with_cuda as scaled
from weft.ops.scaled_matmul import with_torch as scaled_by_torch
from weft.ops.scaled_matmul.quantize import quantize_fp8
from weft.workbench.report.markdown import RESULTS, table

Call = Callable[[int], Any]  # the argument numbers the calls of a graph
Size = tuple[int, int, int]  # m, n, k
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
# GPT-2's products for the MLP and the attention, and a Llama 8B's for the attention's output and down.
LINEAR_SIZES = (
    (16384, 3072, 768),
    (16384, 768, 3072),
    (65536, 2304, 768),
    (8192, 4096, 4096),
    (2048, 4096, 14336),
)
FP8_SIZES = ((8192, 8192, 8192), (4096, 7168, 16384), (4096, 4096, 4096), (512, 4096, 4096))
# What torch computes behind a linear layer (its cuBLAS call adds the bias) for the same outputs.
EPILOGUES: dict[wgmma.Epilogue, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    wgmma.Epilogue.BIAS: lambda y, residual: y,
    wgmma.Epilogue.GELU_PRE: lambda y, residual: torch.nn.functional.gelu(y, approximate="tanh"),
    wgmma.Epilogue.RESIDUAL: lambda y, residual: y + residual,
}
MOST_DIVIDED = 1 << 22  # elements of c: parts of K are timed up to this size
# n, k of weights (N, K): a Llama 8B's products for queries, keys and values, the attention's output, gate and
# up, down, and the vocabulary; then squares.
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
WEIGHTS = (*LLAMA_8B, (14336, 4096), (8192, 8192), (2048, 2048))
ROWS = (1, 2, 4, 8, 16, 32, 64)
INVARIANT_ROWS = (1, 16, 64, 4096)
# Storage of a and b: k is contiguous along K, m and n across it.
TF32_SIZES = tuple((size, size, size, order) for size in (8192, 4096, 2048) for order in ("kn", "kk", "mn"))
CHECKED_ROWS = 64
ROUNDS, GRAPH_US = 3, 3000.0  # a graph lasts about so long
TF32_RATE = 300  # TFLOP/s, about


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


def tf32_operands(m: int, n: int, k: int, order: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a (M, K) and b (K, N) in an order of storage."""
    a = matrix(m, k, order[0] == "k", device, torch.float32)
    return a, matrix(k, n, order[1] == "n", device, torch.float32)


def tf32_error(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest error in some rows of a product, among them the last; up to 0.6 is right.

    The unit is that of one rounding of the exact product of what tensor cores multiply (float32 without the
    last 13 bits of its mantissa), and 2^-18 for each term, of whose sum they cut off the last bits.
    """
    m = a.shape[0]
    rows = torch.cat(
        [torch.randperm(m, device=a.device)[:CHECKED_ROWS], torch.arange(max(0, m - 8), m).to(a.device)]
    )
    a, b = ((x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32).double() for x in (a[rows], b))
    unit = torch.finfo(torch.float32).eps * (a @ b).abs() + 2.0**-18 * (a.abs() @ b.abs())
    return float(((c[rows].double() - a @ b).abs() / unit).nan_to_num(1e9).max())


def compile_programs(sizes: Sequence[tuple[int, int, int, str]], device: str) -> int:
    """Compile the programs of tf32 products together; return how many they are."""
    sources = {wgmma.chosen_source(*tf32_operands(*size, device)) for size in sizes}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda source: source.compile(f"sm_{wgmma.ARCH}a"), sources))
    return len(sources)


def tf32_lines(
    device: str = "cuda", sizes: Sequence[tuple[int, int, int, str]] = TF32_SIZES
) -> Iterator[str]:
    """Yield one line a size and order of storage."""
    if device == "cuda":
        compile_programs(sizes, device)
    yield "tf32 m n k order: us by weft, us by torch.mm, torch / weft, TFLOP/s of weft"
    for m, n, k, order in sizes:
        a, b = tf32_operands(m, n, k, order, device)
        if (largest := tf32_error(wgmma.forward(a, b), a, b)) >= 0.6:
            yield f"tf32 {m} {n} {k} {order}: wrong, the largest error is {largest:.3g} (< 0.6): not timed"
            continue
        ours: Call = lambda i, a=a, b=b: wgmma.forward(a, b)  # type: ignore[misc]  # noqa: E731
        library: Call = lambda i, a=a, b=b: call_at_precision(torch.mm, a, "tf32", a, b)  # type: ignore[misc]  # noqa: E731
        expected_us = 2e-6 * m * n * k / TF32_RATE
        us, library_us = graph_times([ours, library], max(2, min(100, int(GRAPH_US / expected_us))))
        figures = f"{us:.1f} {library_us:.1f} {library_us / us:.3f} {2e-6 * m * n * k / us:.0f}"
        yield f"tf32 {m} {n} {k} {order}: {figures}"


def short_name(config: wgmma.Config) -> str:
    """Return the name of a configuration in the printed lines; see the module's docstring."""
    band = f"b{config.band}" * (config.band != wgmma.Config.band)
    rows = "" if config.rows == 128 else f"{config.rows}x"
    marks = f"k{config.k_parts}" * (config.k_parts > 1) + "a" * config.share_a + "p" * config.pingpong
    return f"{rows}{config.columns}c{config.cluster}{marks}{band}"


def wide_options(m: int, n: int, k: int) -> dict[str, tuple[wgmma.Config, int]]:
    """Return the configurations and parts of K that are timed at a size, by a short name."""
    options = {short_name(c): (c, 1) for c in wgmma.CANDIDATES}
    if m * n <= MOST_DIVIDED and k >= 2048:
        options |= {
            f"{short_name(c)}s{splits}": (c, splits)
            for c in wgmma.CANDIDATES
            if c.columns in (128, 256) and not c.pingpong
            for splits in (2, 4, 8)
        }
    return options


def wide_lines(
    device: str = "cuda", sizes: Sequence[tuple[int, int, int, bool, bool]] = WIDE_SIZES
) -> Iterator[str]:
    """Yield one line a size: what the model chooses, and the times of all contenders."""
    if device == "cuda":
        for config in (c for c in wgmma.CANDIDATES if c.cluster > 1):
            kernel = wgmma.source(DTYPE, config, True, False)["matmul_wgmma"]
            at_once = wgmma.max_clusters(kernel, config, torch.device("cuda"))
            yield f"clusters at once of {short_name(config)}: {at_once}"
    for m, n, k, a_by_k, b_by_k in sizes:
        a, b = matrix(m, k, a_by_k, device), matrix(k, n, not b_by_k, device)
        chosen, splits = wgmma.choose(a, b)
        calls: dict[str, Call] = {"torch": lambda i, a=a, b=b: torch.mm(a, b)}  # type: ignore[misc]
        for name, (config, parts) in wide_options(m, n, k).items():
            calls[name] = lambda i, a=a, b=b, c=config, s=parts: wgmma.forward_with(c, a, b, s)  # type: ignore[misc]
        timed = _timed(calls, 2e-6 * m * n * k, ("torch",))
        yield f"{m} {n} {k} chosen {short_name(chosen)}s{splits} {timed}"


def invariant_lines(
    device: str = "cuda",
    weights: Sequence[tuple[int, int]] = LLAMA_8B,
    rows: Sequence[int] = INVARIANT_ROWS,
    l2_bytes: int = 0,
) -> Iterator[str]:
    """Yield one line for each weight and number of rows: batch-invariant products beside ``torch.mm``.

    Then the geometric means over the weights, of at most 64 rows and of more.
    """
    l2_bytes = l2_bytes or torch.cuda.get_device_properties(0).L2_cache_size
    ratios: dict[bool, list[float]] = {True: [], False: []}
    yield "n k m: us by weft, us by torch.mm, torch / weft"
    for n, k in weights:
        bytes_read = n * k * DTYPE.itemsize
        ws = [matrix(n, k, True, device).t() for _ in range(max(1, -(-3 * l2_bytes // bytes_read)))]
        for m in rows:
            x = matrix(m, k, True, device)
            likely_us = max(bytes_read / 4e6, 2e-6 * m * n * k / 600)
            count = -(-int(max(1.0, min(100.0, GRAPH_US / likely_us))) // len(ws)) * len(ws)
            ours: Call = lambda i, x=x, ws=ws: invariant.forward(x, ws[i % len(ws)])  # type: ignore[misc]  # noqa: E731
            library: Call = lambda i, x=x, ws=ws: torch.mm(x, ws[i % len(ws)])  # type: ignore[misc]  # noqa: E731
            us, library_us = graph_times([ours, library], count)
            ratios[m <= skinny.MAX_ROWS].append(library_us / us)
            yield f"{n} {k} {m}: {us:.1f} {library_us:.1f} {library_us / us:.2f}"
    for is_few, values in ratios.items():
        if values:
            size = "at most" if is_few else "more than"
            mean = statistics.geometric_mean(values)
            yield f"geometric mean of torch / weft, {size} {skinny.MAX_ROWS} rows: {mean:.3f}"


def _timed(calls: dict[str, Call], mega_flop: float, libraries: Sequence[str], likely_rate: int = 600) -> str:
    """Return the times of all contenders in us, and TFLOP/s of the libraries and the fastest other one."""
    count = max(2, min(100, int(GRAPH_US / (mega_flop / likely_rate))))
    times = graph_times(list(calls.values()), count)
    figures = {name: round(t, 1) for name, t in zip(calls, times, strict=True)}
    best = min((name for name in figures if name not in libraries), key=lambda name: figures[name])
    rates = ", ".join(f"{name} {mega_flop / figures[name]:.0f}" for name in (*libraries, best))
    return f"{figures} TFLOP/s: {rates}"


def linear_lines(device: str = "cuda", sizes: Sequence[Size] = LINEAR_SIZES) -> Iterator[str]:
    """Yield a line for each size and epilogue: Weft's configurations beside torch's product and epilogue."""
    for m, n, k in sizes:
        x, weight = matrix(m, k, True, device), matrix(n, k, True, device)
        bias, residual = matrix(1, n, True, device)[0], matrix(m, n, True, device)
        for epilogue, finish in EPILOGUES.items():
            calls: dict[str, Call] = {"torch": partial(_library_linear, finish, x, weight, bias, residual)}
            added = residual if epilogue == wgmma.Epilogue.RESIDUAL else None
            for config in wgmma.CANDIDATES:
                calls[short_name(config)] = partial(_linear, config, x, weight, epilogue, bias, added)
            chosen, splits = wgmma.choose(x, weight.t(), epilogue)
            timed = _timed(calls, 2e-6 * m * n * k, ("torch",))
            yield f"{m} {n} {k} {epilogue.name.lower()} chosen {short_name(chosen)}s{splits} {timed}"


def _library_linear(finish: Any, x: Any, weight: Any, bias: Any, residual: Any, _: int) -> torch.Tensor:
    return finish(torch.nn.functional.linear(x, weight, bias), residual)  # type: ignore[no-any-return]


def _linear(
    config: wgmma.Config, x: Any, weight: Any, epilogue: Any, bias: Any, residual: Any, _: int
) -> Any:
    return wgmma.forward_with(config, x, weight.t(), 1, epilogue, bias, residual)


def fp8_lines(device: str = "cuda", sizes: Sequence[Size] = FP8_SIZES) -> Iterator[str]:
    """Yield a line for each size and kind of scales: Weft's configurations beside ``torch._scaled_mm``.

    Fast sums stay in the tensor cores for all of K. The library has them for scales of tensors and rows.
    """
    for m, n, k in sizes:
        x, w = (matrix(rows, k, True, device) for rows in (m, n))
        for a_blocks, b_blocks in (("tensor", "tensor"), ("row", "column"), ("1x128", "128x128")):
            (a, scale_a), (b, scale_b) = quantize_fp8(x, a_blocks), quantize_fp8(w.t(), b_blocks)
            by_blocks = a_blocks == "1x128"
            chosen, splits = scaled.choose(m, n, k, x.device, by_blocks)
            calls = library_fp8(a, b, scale_a, scale_b, by_blocks)
            libraries = tuple(calls)
            for config in scaled.COSTS[by_blocks]:
                calls[fp8_name(config)] = partial(_fp8_product, config, (a, b, scale_a, scale_b))
            timed = _timed(calls, 2e-6 * m * n * k, libraries, 1200)
            yield f"{m} {n} {k} {a_blocks} chosen {fp8_name(chosen)}s{splits} {timed}"


def _fp8_product(config: scaled.Config, operands: tuple[torch.Tensor, ...], _: int) -> torch.Tensor:
    return scaled.forward_with(config, *operands)


def library_fp8(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, by_blocks: bool
) -> dict[str, Call]:
    """Return the calls of ``torch._scaled_mm``, with the scales of blocks in its order beforehand."""
    if by_blocks:
        scale_a, scale_b = scaled_by_torch.in_library_order(scale_a, scale_b)
    product = partial(torch._scaled_mm, a, b, scale_a, scale_b, out_dtype=DTYPE)
    calls: dict[str, Call] = {"torch": lambda _: product(use_fast_accum=False)}
    if not by_blocks:
        calls["torch-fast"] = lambda _: product(use_fast_accum=True)
    return calls


def fp8_name(config: scaled.Config) -> str:
    """Return the name of a configuration of float8; see the module's docstring."""
    rows = f"{config.rows}x" if config.rows != 128 else ""
    return f"{rows}{config.columns}c{config.cluster}" + "a" * config.share_a + "d" * (config.sets == 2)


def few_rows_lines(
    device: str = "cuda",
    weights: Sequence[tuple[int, int]] = WEIGHTS,
    rows: Sequence[int] = ROWS,
    l2_bytes: int = 0,
) -> Iterator[str]:
    """Yield one line for each weight and number of rows, and the geometric mean over a Llama 8B's.

    Weft's product is that of ``impl="cuda"``; skinny.py is the one that divides K. ``l2_bytes`` 0 is the
    device's own.
    """
    ratios = []
    l2_bytes = l2_bytes or torch.cuda.get_device_properties(0).L2_cache_size
    yield "n k m: us by weft, us by skinny.py, us by torch.mm, torch / weft, TB/s of the weight by weft"
    for n, k in weights:
        bytes_read = n * k * DTYPE.itemsize
        ws = [matrix(n, k, True, device).t() for _ in range(max(1, -(-3 * l2_bytes // bytes_read)))]
        count = -(-int(max(1.0, min(100.0, GRAPH_US * 4e6 / bytes_read))) // len(ws)) * len(ws)
        for m in rows:
            x = matrix(m, k, True, device)
            products = (with_cuda.forward, skinny.forward, torch.mm)
            calls = [lambda i, p=p, x=x, ws=ws: p(x, ws[i % len(ws)]) for p in products]
            us, skinny_us, library_us = graph_times(calls, count)
            if (n, k) in LLAMA_8B:
                ratios.append(library_us / us)
            figures = f"{us:.1f} {skinny_us:.1f} {library_us:.1f} {library_us / us:.2f}"
            yield f"{n} {k} {m}: {figures} {bytes_read * 1e-6 / us:.2f}"
    if ratios:
        mean = statistics.geometric_mean(ratios)
        yield f"geometric mean of torch / weft, a Llama 8B's products: {mean:.3f}"


def recorded_table(
    record: str, points: Sequence[str], columns: dict[str, str], *, unit: str, largest: bool = False
) -> str:
    """Return figures of a committed record in ``results/`` as a Markdown table, the best of a row bold.

    ``points`` are the beginnings of its lines, ``columns`` headers of the figures' names; ``chosen`` is the
    configuration that the line says is chosen. ``largest``: the largest figure is the best.
    """
    rows = []
    lines = (RESULTS / record).read_text(encoding="utf-8").splitlines()
    for point in points:
        line = next(text for text in lines if text.startswith((f"{point} chosen ", f"{point} {{")))
        figures = ast.literal_eval(line[line.index("{") : line.index("}") + 1])
        if " chosen " in line:
            figures["chosen"] = figures.get(line.split(" chosen ")[1].split()[0])
        values = [figures[name] for name in columns]
        best = (max if largest else min)(values)
        rows.append((point, *(f"**{v}**" if v == best else f"{v}" for v in values)))
    return table((unit, *columns.values()), rows, " " + "r" * len(columns))


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "wide": wide_lines,
    "few-rows": few_rows_lines,
    "invariant": invariant_lines,
    "linear": linear_lines,
    "fp8": fp8_lines,
    "tf32": tf32_lines,
}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 2 for an unknown part, or without a GPU that the kernels run on."""
    parser = argparse.ArgumentParser(
        prog="python3 -m weft.lab.products",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", help=f"parts to measure: {', '.join(PARTS)} [default: all]")
    parts = parser.parse_args(arguments).parts or list(PARTS)
    try:
        if unknown := sorted({*parts} - {*PARTS}):
            raise WeftError("the parts of lab.products", expected=", ".join(PARTS), got=", ".join(unknown))
        if not machine.has_gpu():
            raise WeftError("the times of products", expected="an NVIDIA GPU", got="none")
        if parts != ["few-rows"] and torch.cuda.get_device_capability() != (9, 0):
            raise WeftError("the wgmma products", expected="compute capability 9.0", got="another")
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_properties(0).name}, torch {torch.__version__}, us a call")
    for part in parts:
        print(f"-- {part}")
        for line in PARTS[part]():
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
