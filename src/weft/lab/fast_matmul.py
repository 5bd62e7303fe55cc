"""Fast matrix multiplication as data: bilinear schemes, verified exactly, counted, run and timed.

    python3 -m weft.lab.fast_matmul [--scheme NAME] [--sizes N,N] [--levels N] [--device cuda --dtype bf16]

A scheme <m,n,p;r> multiplies an m x n by an n x p matrix with r products of scalars, or of blocks:

    C_i = sum over k of W[k, i] (sum over a of U[k, a] A_a) (sum over b of V[k, b] B_b)

Its factors U, V and W are integers. :func:`load` reads published factors from JSON and verifies them: no
scheme that is not exact is accepted. Recursion on blocks needs r^levels products of small matrices.

Sources: Strassen, "Gaussian elimination is not optimal" (1969); Winograd, "On multiplication of 2 x 2
matrices" (1971); Laderman, "A noncommutative algorithm for multiplying 3 x 3 matrices using 23
multiplications" (1976); Hopcroft and Kerr, "On minimizing the number of multiplications necessary for matrix
multiplication" (1971); Higham, "Accuracy and Stability of Numerical Algorithms", chapter 23 (2002).
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import torch

from weft.core.errors import WeftError
from weft.core.json_files import content_errors, read_json
from weft.core.operator import unknown_name

INTEGERS, MODULO_2 = "integers", "modulo 2"
# Orders that the search for shared sums tries, by the largest number of rows: many rows take seconds.
RESTARTS = {25: 40, 64: 4}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_ENTRIES = 1 << 22  # of the tensor that a scheme is compared with
Matrix = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LinearProgram:
    """Linear combinations of inputs as a list of sums.

    Values 0 to ``num_inputs`` - 1 are the inputs; each of ``sums`` appends a value, a weighted sum of earlier
    ones. ``outputs`` are values as (coefficient, value), and None is 0.
    """

    num_inputs: int
    sums: tuple[tuple[tuple[int, int], ...], ...]
    outputs: tuple[tuple[int, int] | None, ...]

    @property
    def additions(self) -> int:
        return sum(len(terms) - 1 for terms in self.sums)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the outputs for these tensors, all of one shape."""
        values = list(inputs)
        for terms in self.sums:
            (coefficient, first), *others = terms
            total = values[first] if coefficient == 1 else values[first] * coefficient
            for coefficient, index in others:
                total = torch.add(total, values[index], alpha=coefficient)
            values.append(total)
        return [
            None if o is None else values[o[1]] if o[0] == 1 else values[o[1]] * o[0] for o in self.outputs
        ]

    def matrix(self) -> Matrix:
        """Return the combinations as integers: a row for each output."""
        values = [tuple(int(i == j) for j in range(self.num_inputs)) for i in range(self.num_inputs)]
        for terms in self.sums:
            values.append(tuple(sum(c * values[v][j] for c, v in terms) for j in range(self.num_inputs)))
        zero = (0,) * self.num_inputs
        return tuple(zero if o is None else tuple(o[0] * x for x in values[o[1]]) for o in self.outputs)


def combine(rows: Matrix, seed: int | None = None) -> LinearProgram:
    """Return a program for the combinations ``rows``; it computes sums that several rows share once.

    Greedy: the pair of terms that most rows have, up to a factor, becomes a value. ``seed`` breaks ties.
    """
    order = random.Random(seed)
    num_inputs = len(rows[0])
    open_rows = [{j: c for j, c in enumerate(row) if c} for row in rows]
    sums: list[tuple[tuple[int, int], ...]] = []
    while True:
        counts: Counter[tuple[int, int, int]] = Counter()
        for row in open_rows:
            for i, j in combinations(sorted(row), 2):
                if abs(row[i]) == abs(row[j]):
                    counts[i, j, row[j] // row[i]] += 1
        most = max(counts.values(), default=0)
        if most < 2:
            break
        best = sorted(pair for pair, count in counts.items() if count == most)
        i, j, sign = best[0] if seed is None else order.choice(best)
        value = num_inputs + len(sums)
        sums.append(((1, i), (sign, j)))
        for row in open_rows:
            if i in row and j in row and row[j] == sign * row[i]:
                row[value] = row.pop(i)
                del row[j]
    outputs: list[tuple[int, int] | None] = []
    for row in open_rows:
        terms = sorted(((c, v) for v, c in row.items()), reverse=True)
        if len(terms) > 1:
            sums.append(tuple(terms))
            terms = [(1, num_inputs + len(sums) - 1)]
        outputs.append(terms[0] if terms else None)
    return LinearProgram(num_inputs, tuple(sums), tuple(outputs))


def shortest_program(rows: Matrix) -> LinearProgram:
    """Return the program with the fewest additions of some orders of :func:`combine`."""
    size = max(len(rows), len(rows[0]))
    restarts = next((count for limit, count in RESTARTS.items() if size <= limit), 0)
    programs = (combine(rows, seed) for seed in (None, *range(restarts)))
    return min(programs, key=lambda program: program.additions)


@dataclass(frozen=True)
class Scheme:
    """A bilinear scheme <m,n,p;r>. ``field`` is ``integers``, or ``modulo 2`` if it holds there only."""

    name: str
    size: tuple[int, int, int]
    u: Matrix
    v: Matrix
    w: Matrix
    source: str = ""
    field: str = INTEGERS

    @property
    def rank(self) -> int:
        """Number of multiplications."""
        return len(self.u)

    @property
    def label(self) -> str:
        return f"<{','.join(map(str, self.size))};{self.rank}>"

    @property
    def exponent(self) -> float:
        """The exponent omega of the recursion's cost n^omega: 3 log(r) / log(m n p)."""
        import math

        return 3 * math.log(self.rank) / math.log(math.prod(self.size))

    @property
    def plain_additions(self) -> int:
        """Additions without shared sums, as the factors are written."""
        inputs = sum(sum(map(bool, row)) - 1 for rows in (self.u, self.v) for row in rows)
        outputs = sum(sum(map(bool, column)) - 1 for column in zip(*self.w, strict=True))
        return inputs + outputs

    @property
    def additions(self) -> tuple[int, int, int]:
        """Additions of blocks of A, of B and of the products, with shared sums computed once."""
        a, b, c = programs(self)
        return a.additions, b.additions, c.additions

    def verify(self) -> None:
        """Raise :class:`WeftError` unless the factors give the matrix product exactly, by integers."""
        m, n, p = self.size
        lengths = {"U": (self.u, m * n), "V": (self.v, n * p), "W": (self.w, m * p)}
        for name, (rows, length) in lengths.items():
            if len(rows) != self.rank or any(len(row) != length for row in rows):
                expected = f"{self.rank} rows of {length} integers"
                raise WeftError(f"{self.name}: factor {name}", expected=expected, got="another shape")
        if m * n * n * p * m * p > MAX_ENTRIES:
            raise WeftError(f"{self.name}: the size", expected="a smaller scheme", got=self.label)
        u, v, w = (torch.tensor(rows, dtype=torch.int64) for rows in (self.u, self.v, self.w))
        # Integers: no rounding can hide a wrong coefficient.
        tensor = torch.einsum("ra,rb,rc->abc", u, v, w)
        product = torch.zeros_like(tensor)
        for i in range(m):
            for j in range(n):
                for k in range(p):
                    product[i * n + j, j * p + k, i * p + k] = 1
        difference = tensor - product
        if self.field == MODULO_2:
            difference %= 2
        if wrong := int(difference.count_nonzero()):
            raise WeftError(
                f"{self.name} {self.label}",
                expected=f"the product of matrices over the {self.field}",
                got=f"{wrong} of {tensor.numel()} terms differ",
            )

    def __matmul__(self, other: Scheme) -> Scheme:
        """Return the tensor product: ``other`` multiplies the blocks of this scheme."""
        size = tuple(a * b for a, b in zip(self.size, other.size, strict=True))
        shapes = ((0, 1), (1, 2), (0, 2))  # dimensions of A, B and C
        factors = []
        for (rows, other_rows), (i, j) in zip(
            ((self.u, other.u), (self.v, other.v), (self.w, other.w)), shapes, strict=True
        ):
            outer, inner = (self.size[i], self.size[j]), (other.size[i], other.size[j])
            factors.append(tuple(_kron(x, outer, y, inner) for x in rows for y in other_rows))
        field = INTEGERS if self.field == other.field == INTEGERS else MODULO_2
        name = f"{self.name}-{other.name}"
        source = f"tensor product of {self.name} and {other.name}"
        u, v, w = factors
        return Scheme(name, (size[0], size[1], size[2]), u, v, w, source=source, field=field)


def _kron(
    x: Sequence[int], outer: tuple[int, int], y: Sequence[int], inner: tuple[int, int]
) -> tuple[int, ...]:
    """Kronecker product of two matrices that are stored as rows, one after another."""
    (a, b), (c, d) = outer, inner
    return tuple(x[i // c * b + j // d] * y[i % c * d + j % d] for i in range(a * c) for j in range(b * d))


@cache
def programs(scheme: Scheme) -> tuple[LinearProgram, LinearProgram, LinearProgram]:
    """Return the scheme's sums of A's blocks, of B's blocks, and of the products."""
    columns = tuple(zip(*scheme.w, strict=True))
    return shortest_program(scheme.u), shortest_program(scheme.v), shortest_program(columns)


def side_by_side(name: str, left: Scheme, right: Scheme, source: str) -> Scheme:
    """Return the scheme whose B and C have the columns of both schemes: ranks add up."""
    m, n, p = left.size
    other_p = right.size[2]
    if left.size[:2] != right.size[:2]:
        raise WeftError("schemes side by side", expected=f"an A of {m} x {n}", got=right.label)

    def widen(rows: Matrix, height: int, width: int, before: int, after: int) -> Matrix:
        return tuple(
            tuple(
                x
                for i in range(height)
                for x in (*(0,) * before, *row[i * width : (i + 1) * width], *(0,) * after)
            )
            for row in rows
        )

    v = widen(left.v, n, p, 0, other_p) + widen(right.v, n, other_p, p, 0)
    w = widen(left.w, m, p, 0, other_p) + widen(right.w, m, other_p, p, 0)
    return Scheme(name, (m, n, p + other_p), left.u + right.u, v, w, source=source)


def standard(m: int, n: int, p: int) -> Scheme:
    """Return the schoolbook scheme, of rank m n p."""
    triples = [(i, j, k) for i in range(m) for j in range(n) for k in range(p)]

    def unit(length: int, index: int) -> tuple[int, ...]:
        return tuple(int(i == index) for i in range(length))

    return Scheme(
        "standard",
        (m, n, p),
        tuple(unit(m * n, i * n + j) for i, j, _ in triples),
        tuple(unit(n * p, j * p + k) for _, j, k in triples),
        tuple(unit(m * p, i * p + k) for i, _, k in triples),
        source="the definition of the product",
    )


def from_formulas(
    name: str,
    size: tuple[int, int, int],
    products: Sequence[str],
    outputs: Mapping[str, Sequence[int]],
    source: str,
) -> Scheme:
    """Return a scheme from its formulas: ``a11+a22 | b11+b22``, and for each output its signed products.

    ``outputs`` maps ``c12`` to the numbers of the products, from 1 on, negative for a subtraction.
    """
    m, n, p = size
    left, right = zip(*(text.split("|") for text in products), strict=True)
    w = [[0] * (m * p) for _ in products]
    for output, numbers in outputs.items():
        column = (int(output[1]) - 1) * p + int(output[2]) - 1
        for number in numbers:
            w[abs(number) - 1][column] = 1 if number > 0 else -1
    u = tuple(_coefficients(text, "a", m, n) for text in left)
    v = tuple(_coefficients(text, "b", n, p) for text in right)
    return Scheme(name, size, u, v, tuple(map(tuple, w)), source=source)


def _coefficients(text: str, letter: str, rows: int, columns: int) -> tuple[int, ...]:
    row = [0] * (rows * columns)
    for sign, i, j in re.findall(rf"([+-]?){letter}(\d)(\d)", text):
        row[(int(i) - 1) * columns + int(j) - 1] = -1 if sign == "-" else 1
    return tuple(row)


STRASSEN = from_formulas(
    "strassen",
    (2, 2, 2),
    (
        *("a11+a22 | b11+b22", "a21+a22 | b11", "a11 | b12-b22", "a22 | b21-b11"),
        *("a11+a12 | b22", "a21-a11 | b11+b12", "a12-a22 | b21+b22"),
    ),
    {"c11": (1, 4, -5, 7), "c12": (3, 5), "c21": (2, 4), "c22": (1, -2, 3, 6)},
    "Strassen (1969)",
)
WINOGRAD = from_formulas(
    "winograd",
    (2, 2, 2),
    (
        *("a11 | b11", "a12 | b21", "a11+a12-a21-a22 | b22", "a22 | b11-b12-b21+b22"),
        *("a21+a22 | b12-b11", "a21+a22-a11 | b11-b12+b22", "a11-a21 | b22-b12"),
    ),
    {"c11": (1, 2), "c12": (1, 3, 5, 6), "c21": (1, -4, 6, 7), "c22": (1, 5, 6, 7)},
    "Winograd (1971)",
)
LADERMAN = from_formulas(
    "laderman",
    (3, 3, 3),
    (
        *("a11+a12+a13-a21-a22-a32-a33 | b22", "a11-a21 | b22-b12"),
        *("a22 | b12-b11+b21-b22-b23-b31+b33", "a21-a11+a22 | b11-b12+b22"),
        *("a21+a22 | b12-b11", "a11 | b11", "a31-a11+a32 | b11-b13+b23", "a31-a11 | b13-b23"),
        *("a31+a32 | b13-b11", "a11+a12+a13-a22-a23-a31-a32 | b23"),
        *("a32 | b13-b11+b21-b22-b23-b31+b32", "a32-a13+a33 | b22+b31-b32"),
        *("a13-a33 | b22-b32", "a13 | b31", "a32+a33 | b32-b31", "a22-a13+a23 | b23+b31-b33"),
        *("a13-a23 | b23-b33", "a22+a23 | b33-b31", "a12 | b21", "a23 | b32", "a21 | b13"),
        *("a31 | b12", "a33 | b33"),
    ),
    {
        "c11": (6, 14, 19),
        "c12": (1, 4, 5, 6, 12, 14, 15),
        "c13": (6, 7, 9, 10, 14, 16, 18),
        "c21": (2, 3, 4, 6, 14, 16, 17),
        "c22": (2, 4, 5, 6, 20),
        "c23": (14, 16, 17, 18, 21),
        "c31": (6, 7, 8, 11, 12, 13, 14),
        "c32": (12, 13, 14, 15, 22),
        "c33": (6, 7, 8, 9, 23),
    },
    "Laderman (1976)",
)
HOPCROFT_KERR = side_by_side(
    "hopcroft-kerr",
    STRASSEN,
    standard(2, 2, 1),
    "rank of Hopcroft and Kerr (1971), as Strassen's scheme beside a product with a vector",
)
SCHEMES: dict[str, Callable[[], Scheme]] = {
    "strassen": lambda: STRASSEN,
    "winograd": lambda: WINOGRAD,
    "laderman": lambda: LADERMAN,
    "hopcroft-kerr": lambda: HOPCROFT_KERR,
    "flip-3x2x3": lambda: load(Path(__file__).with_name("flip_3x2x3.json")),
    "winograd-winograd": lambda: WINOGRAD @ WINOGRAD,
    "strassen-laderman": lambda: STRASSEN @ LADERMAN,
}


@cache
def scheme(name: str) -> Scheme:
    """Return a scheme by name, verified. Raise :class:`WeftError` for an unknown name."""
    if name not in SCHEMES:
        raise unknown_name("scheme", name, list(SCHEMES))
    built = SCHEMES[name]()
    built.verify()
    return built


def load(path: Path) -> Scheme:
    """Read a scheme from JSON: ``name``, ``size`` [m, n, p], ``u``, ``v``, ``w`` (a row each), ``field``.

    Raises :class:`WeftError` for another format, and unless the factors are exact over their field.
    """
    with content_errors(path, "a bilinear scheme"):
        data = read_json(path)
        u, v, w = (tuple(tuple(_integer(x) for x in row) for row in data[name]) for name in "uvw")
        m, n, p = (_integer(x) for x in data["size"])
        field = str(data.get("field", INTEGERS))
        source = str(data.get("source", ""))
        built = Scheme(str(data["name"]), (m, n, p), u, v, w, source=source, field=field)
    if field not in (INTEGERS, MODULO_2) or min(m, n, p) < 1 or not built.u:
        raise WeftError(f"{path}", expected=f"sizes of at least 1, and {INTEGERS} or {MODULO_2}", got=field)
    built.verify()
    return built


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no integer")
    return value


def multiply(a: torch.Tensor, b: torch.Tensor, using: Scheme, levels: int = 1) -> torch.Tensor:
    """Return ``a @ b`` by ``levels`` levels of a scheme, in the tensors' dtype.

    a is (M, N), b is (N, P). Sizes that the scheme does not divide are padded with zeros. A scheme that holds
    modulo 2 only is for integers, and its result is taken modulo 2.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or levels < 0:
        got = f"{tuple(a.shape)} and {tuple(b.shape)}, {levels} levels"
        raise WeftError("a product of two matrices", expected="(M, N), (N, P) and levels >= 0", got=got)
    if using.field == MODULO_2 and a.is_floating_point():
        raise WeftError(f"{using.name} holds modulo 2", expected="integers", got=str(a.dtype))
    (rows, inner), columns = a.shape, b.shape[1]
    steps = [side**levels for side in using.size]
    m, n, p = (-(-x // step) * step for x, step in zip((rows, inner, columns), steps, strict=True))
    padded_a = torch.nn.functional.pad(a, (0, n - inner, 0, m - rows))
    padded_b = torch.nn.functional.pad(b, (0, p - columns, 0, n - inner))
    product = _recurse(padded_a, padded_b, using, levels)[:rows, :columns]
    return product.remainder(2) if using.field == MODULO_2 else product


def _recurse(a: torch.Tensor, b: torch.Tensor, using: Scheme, levels: int) -> torch.Tensor:
    if levels == 0:
        return a @ b
    m, n, p = using.size
    of_a, of_b, of_products = programs(using)
    left, right = of_a.run(_blocks(a, m, n)), of_b.run(_blocks(b, n, p))
    products = [_recurse(x, y, using, levels - 1) for x, y in zip(left, right, strict=True)]  # type: ignore[arg-type]
    blocks = of_products.run(products)
    return torch.cat([torch.cat(blocks[i * p : (i + 1) * p], 1) for i in range(m)])  # type: ignore[arg-type]


def _blocks(x: torch.Tensor, rows: int, columns: int) -> list[torch.Tensor]:
    return [block for strip in x.chunk(rows, 0) for block in strip.chunk(columns, 1)]


def crossover(using: Scheme, flops: float, bandwidth: float, item_bytes: int) -> float:
    """Return the n from which one level of a scheme for square blocks is faster than the product itself.

    Model: a product runs at ``flops`` FLOP/s; an addition of blocks reads two, writes one and is bound by
    ``bandwidth``. One level saves 2 n^3 (1 - r / s^3) FLOPs and moves 3 (n / s)^2 elements an addition, where
    s is the scheme's side.
    """
    side = using.size[0]
    if using.size != (side, side, side):
        raise WeftError("the crossover", expected="a scheme of square blocks", got=using.label)
    saved = 2 * (1 - using.rank / side**3) / flops
    added = sum(using.additions) * 3 * item_bytes / side**2 / bandwidth
    return added / saved


def relative_error(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest error of a product over its largest element, against float64."""
    exact = a.double() @ b.double()
    return float((result.double() - exact).abs().max() / exact.abs().max())


def best_seconds(call: Callable[[], object], repeats: int = 3, device: str = "cpu") -> float:
    """Return the shortest of some times of a call, after a first one that is not counted.

    On a CPU this is the wall time. On a GPU the call is captured in a CUDA graph and events time its replays,
    so that the host's time for many small kernels does not count.
    """
    call()
    if device != "cpu":
        return _graph_seconds(call, repeats)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _graph_seconds(call: Callable[[], object], repeats: int) -> float:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)


def measured_rates(n: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """Return the device's FLOP/s of an n x n product and bytes/s of an n x n addition."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    total = torch.empty_like(a)
    flops = 2.0 * n**3 / best_seconds(lambda: torch.mm(a, b, out=total), device=device)
    seconds = best_seconds(lambda: torch.add(a, b, out=total), device=device)
    return flops, 3.0 * n * n * dtype.itemsize / seconds


def table_lines(
    using: Scheme, sizes: Sequence[int], levels: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Iterator[str]:
    """Yield the table: size, levels, products, time on the device, error against float64."""
    yield f"{using.name} {using.label}, {using.source}"
    of_a, of_b, of_c = using.additions
    yield (
        f"additions a level: {of_a + of_b + of_c} ({of_a} of A, {of_b} of B, {of_c} of products), "
        f"{using.plain_additions} without shared sums; exponent {using.exponent:.3f}"
    )
    yield f"{'n':>6}  {'levels':>6}  {'products':>8}  {'ms':>9}  {'speed-up':>8}  {'error':>8}  growth"
    for n in sizes:
        generator = torch.Generator().manual_seed(n)
        a, b = (torch.randn(n, n, generator=generator).to(device, dtype) for _ in range(2))
        first_time = first_error = 0.0
        for level in range(levels + 1):
            call = lambda a=a, b=b, level=level: multiply(a, b, using, level)  # noqa: E731
            seconds = best_seconds(call, device=device)
            error = relative_error(call(), a, b)
            if level == 0:
                first_time, first_error = seconds, error
            growth = error / first_error if first_error else 1.0
            yield (
                f"{n:>6}  {level:>6}  {using.rank**level:>8}  {seconds * 1e3:>9.2f}  "
                f"{first_time / seconds:>7.2f}x  {error:>8.1e}  {growth:.1f}x"
            )
    if len(set(using.size)) == 1:
        flops, bandwidth = measured_rates(sizes[-1], device, dtype)
        yield (
            f"model: {flops / 1e9:.0f} GFLOP/s and {bandwidth / 1e9:.1f} GB/s here, so one level pays from "
            f"n = {crossover(using, flops, bandwidth, dtype.itemsize):.0f} on"
        )


def main(arguments: list[str] | None = None) -> int:
    """Print the table of one scheme, or of all that are shipped; return 2 for invalid arguments."""
    parser = argparse.ArgumentParser(
        prog="python3 -m weft.lab.fast_matmul",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scheme", metavar="NAME", help=f"{', '.join(SCHEMES)} [default: winograd]")
    parser.add_argument("--file", type=Path, metavar="FILE", help="a scheme's factors as JSON")
    parser.add_argument("--sizes", default="256,512,1024", metavar="N,N", help="sizes of square matrices")
    parser.add_argument("--levels", type=int, default=2, metavar="N", help="levels of recursion, up to 4")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device [default: cpu]")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="data type [default: fp32]")
    options = parser.parse_args(arguments)
    try:
        sizes = [int(n) if n.isdecimal() else 0 for n in options.sizes.split(",")]
        if not all(1 <= n <= 1 << 14 for n in sizes):
            raise WeftError("--sizes", expected="numbers from 1 to 16384", got=options.sizes)
        if not 0 <= options.levels <= 4:
            raise WeftError("--levels", expected="a number from 0 to 4", got=options.levels)
        if options.scheme is not None and options.file is not None:
            raise WeftError("one scheme", expected="--scheme or --file", got="both")
        if options.device == "cuda" and not torch.cuda.is_available():
            raise WeftError("--device cuda", expected="a GPU", got="no GPU is visible to torch")
        using = load(options.file) if options.file else scheme(options.scheme or "winograd")
        for line in table_lines(using, sizes, options.levels, options.device, DTYPES[options.dtype]):
            print(line, flush=True)
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
