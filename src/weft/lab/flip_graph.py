"""Search for schemes of matrix multiplication in the flip graph, modulo 2, and lift them to the integers.

    python3 -m weft.lab.flip_graph 3x2x3 --rank 15 --seed 1

The search walks at random from the schoolbook scheme. Two products that share a factor can be rewritten,
``a b c + a b' c' = a (b + b') c + a b' (c + c')``, at the same rank; sometimes two products then become one.
A scheme modulo 2 is lifted by signs, which solve a linear system modulo 2. Not every scheme has a solution.

Source: Kauers and Moosbauer, "Flip graphs for matrix multiplication" (arXiv:2212.01175).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys

from weft.core.errors import WeftError
from weft.lab.fast_matmul import INTEGERS, MODULO_2, Scheme, standard

CHECK_EVERY = 20  # flips between two looks for products that can be merged
PATIENCE = 30_000  # flips without a lower rank, after which one product is split into two
FACTOR_PAIRS = ((0, 1, 2), (0, 2, 1), (1, 2, 0))  # two factors that are equal, and the third, which is added
SOURCE = "a walk in the flip graph of Kauers and Moosbauer"
Rows = list[list[int]]  # for each product its three factors, as bits


def search(size: tuple[int, int, int], rank: int, *, seed: int = 0, flips: int = 2_000_000) -> Scheme | None:
    """Return a scheme modulo 2 of at most this rank, or None if the walk has not met one after ``flips``."""
    generator = random.Random(seed)
    rows = _to_bits(standard(*size))
    best, since = len(rows), 0
    for flip in range(flips):
        merged = _flip(rows, generator) or flip % CHECK_EVERY == 0
        if merged:
            _merge(rows)
        since += 1
        if len(rows) < best:
            best, since = len(rows), 0
        if best <= rank:
            return _to_scheme(rows, size)
        if since > PATIENCE:
            since = 0
            _split(rows, generator)
    return None


def _flip(rows: Rows, generator: random.Random) -> bool:
    """Rewrite two random products that share a factor; return True if a factor became zero."""
    factor = generator.randrange(3)
    i = generator.randrange(len(rows))
    others = [j for j, row in enumerate(rows) if j != i and row[factor] == rows[i][factor]]
    if not others:
        return False
    j = generator.choice(others)
    second = (factor + 1 + generator.randrange(2)) % 3
    third = 3 - factor - second
    rows[i][second] ^= rows[j][second]
    rows[j][third] ^= rows[i][third]
    return not (rows[i][second] and rows[j][third])


def _merge(rows: Rows) -> None:
    """Drop products of zero, and add those that share two factors."""
    changed = True
    while changed:
        rows[:] = [row for row in rows if all(row)]
        changed = False
        for x, y, z in FACTOR_PAIRS:
            first: dict[tuple[int, int], int] = {}
            for i, row in enumerate(rows):
                if (earlier := first.setdefault((row[x], row[y]), i)) != i:
                    rows[earlier][z] ^= row[z]
                    del rows[i]
                    changed = True
                    break
            if changed:
                break


def _split(rows: Rows, generator: random.Random) -> None:
    """Write one product as two, with a factor of another: a way out of a region without lower ranks."""
    i, j = generator.sample(range(len(rows)), 2)
    if rows[i][0] != rows[j][0]:
        rows.append([rows[j][0], rows[i][1], rows[i][2]])
        rows[i][0] ^= rows[j][0]
        _merge(rows)


def _to_bits(scheme: Scheme) -> Rows:
    return [
        [sum((x & 1) << position for position, x in enumerate(factor)) for factor in product]
        for product in zip(scheme.u, scheme.v, scheme.w, strict=True)
    ]


def _to_scheme(rows: Rows, size: tuple[int, int, int]) -> Scheme:
    m, n, p = size
    u, v, w = (
        tuple(tuple(row[f] >> position & 1 for position in range(length)) for row in rows)
        for f, length in enumerate((m * n, n * p, m * p))
    )
    return Scheme("x".join(map(str, size)), size, u, v, w, source=SOURCE, field=MODULO_2)


def lift(scheme: Scheme) -> Scheme | None:
    """Return the scheme over the integers with the same products and signs, or None if none is right.

    With coefficients 1 - 2 s, the tensor is right modulo 4 if the signs s solve a linear system modulo 2,
    with an equation for each of its elements. It is then right over the integers where few terms overlap.
    """
    factors = (scheme.u, scheme.v, scheme.w)
    unknowns = [
        (f, r, position)
        for f, factor in enumerate(factors)
        for r, row in enumerate(factor)
        for position, x in enumerate(row)
        if x % 2
    ]
    variables = {key: number for number, key in enumerate(unknowns)}
    m, n, p = scheme.size
    pivots: dict[int, tuple[int, int]] = {}
    for a in range(m * n):
        for b in range(n * p):
            for c in range(m * p):
                products = [
                    r
                    for r in range(scheme.rank)
                    if scheme.u[r][a] % 2 and scheme.v[r][b] % 2 and scheme.w[r][c] % 2
                ]
                is_term = a % n == b // p and a // n == c // p and b % p == c % p
                equation = 0
                for r in products:
                    for key in ((0, r, a), (1, r, b), (2, r, c)):
                        equation ^= 1 << variables[key]
                if not _eliminate(pivots, equation, ((len(products) - is_term) // 2) & 1):
                    return None
    signs = _solve(pivots, len(variables))
    u, v, w = (
        tuple(
            tuple(0 if x % 2 == 0 else 1 - 2 * signs[variables[f, r, k]] for k, x in enumerate(row))
            for r, row in enumerate(factor)
        )
        for f, factor in enumerate(factors)
    )
    lifted = Scheme(scheme.name, scheme.size, u, v, w, source=scheme.source, field=INTEGERS)
    try:
        lifted.verify()
    except WeftError:
        return None  # right modulo 4 alone
    return lifted


def _eliminate(pivots: dict[int, tuple[int, int]], equation: int, right: int) -> bool:
    """Reduce an equation by the pivots and store it; return False if it contradicts them."""
    while equation:
        highest = equation.bit_length() - 1
        if highest not in pivots:
            pivots[highest] = (equation, right)
            return True
        known, known_right = pivots[highest]
        equation, right = equation ^ known, right ^ known_right
    return not right


def _solve(pivots: dict[int, tuple[int, int]], count: int) -> list[int]:
    """Return a solution, with 0 for what the equations leave free."""
    values = [0] * count
    for highest in sorted(pivots):
        equation, right = pivots[highest]
        lower = (i for i in range(highest) if equation >> i & 1)
        values[highest] = (right + sum(values[i] for i in lower)) % 2
    return values


def main(arguments: list[str] | None = None) -> int:
    """Search, lift and print the scheme as JSON; return 1 if none was found, 2 for invalid arguments."""
    parser = argparse.ArgumentParser(
        prog="python3 -m weft.lab.flip_graph",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("size", metavar="MxNxP", help="sizes of the matrices, such as 3x2x3")
    parser.add_argument("--rank", type=int, required=True, metavar="R", help="largest rank that is wanted")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--flips", type=int, default=2_000_000, metavar="N", help="length of the walk")
    options = parser.parse_args(arguments)
    sides = re.fullmatch(r"([1-5])x([1-5])x([1-5])", options.size)
    if not sides:
        print(f"error: the size: expected sides of 1 to 5 as in 3x2x3, got {options.size}", file=sys.stderr)
        return 2
    size = (int(sides[1]), int(sides[2]), int(sides[3]))
    scheme = search(size, options.rank, seed=options.seed, flips=options.flips)
    if scheme is None:
        print(f"no scheme of rank {options.rank} after {options.flips} flips", file=sys.stderr)
        return 1
    scheme.verify()
    scheme = lift(scheme) or scheme
    names = ("name", "size", "u", "v", "w", "source", "field")
    print(json.dumps({name: getattr(scheme, name) for name in names}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
