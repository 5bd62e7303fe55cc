"""Claims about floating-point arithmetic: sums, ranges, cancellation, low precision, fast products."""

from __future__ import annotations

import math

import torch

from weft.lab import fast_matmul
from weft.lab.claims.ledger import COMMON, DEPENDS, FALSE, TRUE, Evidence, Source, claim
from weft.machine import specs

GOLDBERG = Source(
    "David Goldberg",
    "What every computer scientist should know about floating-point arithmetic",
    1991,
    "https://doi.org/10.1145/103162.103163",
)
SUMMATION = Source(
    "Nicholas Higham", "The accuracy of floating point summation", 1993, "https://doi.org/10.1137/0914050"
)
VARIANCE = Source(
    "Tony Chan, Gene Golub, Randall LeVeque",
    "Algorithms for Computing the Sample Variance",
    1983,
    "https://doi.org/10.1080/00031305.1983.10483115",
)
ACCURACY = Source("Nicholas Higham", "Accuracy and Stability of Numerical Algorithms", 2002)
GELU = Source(
    "Dan Hendrycks, Kevin Gimpel", "Gaussian Error Linear Units", 2016, "https://arxiv.org/abs/1606.08415"
)
BF16 = Source(
    "Dhiraj Kalamkar et al.",
    "A Study of BFLOAT16 for Deep Learning Training",
    2019,
    "https://arxiv.org/abs/1905.12322",
)
FP8 = Source(
    "Paulius Micikevicius et al.", "FP8 Formats for Deep Learning", 2022, "https://arxiv.org/abs/2209.05433"
)
TF32_BITS = 10  # explicit bits of its significand


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _one_after_another(x: torch.Tensor) -> float:
    """Return the sum of x, each partial sum rounded to its dtype."""
    total = torch.zeros((), dtype=x.dtype)
    for value in x:
        total = total + value
    return float(total)


@claim(
    "gelu-tanh-by-exp",
    "tanh in GELU may be computed as (e - 1) / (e + 1) with e = exp(2u) in float32.",
    COMMON,
    argument="Values in float32 over x: exp(2u) overflows, and infinity over infinity is NaN",
    expected=DEPENDS,
)
def tanh_by_exp_is_safe() -> Evidence:
    x = torch.linspace(0, 16, 16001, dtype=torch.float32)
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    e = torch.exp(2 * u)
    y = x / 2 * (1 + (e - 1) / (e + 1))
    first = float(x[y.isnan()].min())
    settings = {f"|x| up to {limit}": not bool(y[x <= limit].isnan().any()) for limit in (5, 10, 11)}
    return Evidence(settings, {"least x whose result is NaN": first})


@claim(
    "variance-by-squares",
    "A variance may be computed in one pass as the mean of squares minus the square of the mean.",
    COMMON,
    argument="Relative error in float32 for rows of 4096 normal numbers with different means",
    expected=DEPENDS,
)
def variance_by_squares_is_accurate() -> Evidence:
    settings, figures = {}, {}
    for mean in (0.0, 10.0, 1e4):
        x = (_normal(4096) + mean).float()
        exact = float(x.double().var(unbiased=False))
        error = abs(float((x * x).mean() - x.mean() ** 2) - exact) / exact
        settings[f"mean {mean:g}, deviation 1"] = error < 1e-3
        figures[f"relative error, mean {mean:g}"] = error
    return Evidence(settings, figures)


@claim(
    "welford-accurate",
    "Welford's update of mean and variance is accurate in one pass, also for a large mean.",
    VARIANCE,
    argument="Relative error in float32 for rows of 4096 normal numbers with different means",
    expected=TRUE,
)
def welford_is_accurate() -> Evidence:
    settings, figures = {}, {}
    for shift in (0.0, 10.0, 1e4):
        x = (_normal(4096) + shift).float()
        mean, squares = torch.zeros(()), torch.zeros(())
        for count, value in enumerate(x, 1):
            delta = value - mean
            mean = mean + delta / count
            squares = squares + delta * (value - mean)
        exact = float(x.double().var(unbiased=False))
        error = abs(float(squares) / len(x) - exact) / exact
        settings[f"mean {shift:g}, deviation 1"] = error < 1e-3
        figures[f"relative error, mean {shift:g}"] = error
    return Evidence(settings, figures)


@claim(
    "bf16-accumulation",
    "A sum of bf16 numbers may be accumulated in bf16.",
    COMMON,
    argument="Sums of ones, each partial sum rounded to bf16: 256 + 1 rounds to 256",
    expected=DEPENDS,
)
def bf16_accumulation_is_accurate() -> Evidence:
    settings, figures = {}, {}
    for count in (100, 256, 1000):
        total = _one_after_another(torch.ones(count, dtype=torch.bfloat16))
        settings[f"{count} terms"] = abs(total / count - 1) < 0.01
        figures[f"sum of {count} ones"] = total
    return Evidence(settings, figures)


@claim(
    "float32-counts-2-24",
    "float32 counts every integer up to 2^24, and no further.",
    GOLDBERG,
    argument="Addition of 1 on both sides of 2^24",
    expected=TRUE,
)
def float32_counts_to_2_24() -> Evidence:
    def plus_one(n: int) -> float:
        return float(torch.tensor(float(n), dtype=torch.float32) + 1)

    below, at = plus_one(2**24 - 1), plus_one(2**24)
    settings = {"2^24 - 1 plus 1": below == 2**24, "2^24 plus 1 is lost": at == 2**24}
    return Evidence(settings, {"2^24 - 1 plus 1": below, "2^24 plus 1": at})


@claim(
    "softmax-without-maximum",
    "Softmax in float32 needs no subtraction of the maximum.",
    COMMON,
    argument="exp overflows above 88.7; tried at rows with different largest values",
    expected=DEPENDS,
)
def softmax_needs_no_maximum() -> Evidence:
    settings, figures = {}, {"largest x with a finite exp": math.log(torch.finfo(torch.float32).max)}
    for largest in (10.0, 80.0, 90.0):
        x = torch.linspace(-10, largest, 100, dtype=torch.float32)
        y = x.exp() / x.exp().sum()
        error = float((y.double() - x.double().softmax(0)).abs().max())
        settings[f"values up to {largest:g}"] = error < 1e-6
        figures[f"largest error, values up to {largest:g}"] = error
    return Evidence(settings, figures)


@claim(
    "sum-order-matters",
    "The order of a float32 sum changes its bits, so that a parallel sum with atomics is not reproducible.",
    GOLDBERG,
    argument="Sums of the same numbers in ten random orders",
    expected=TRUE,
)
def order_of_a_sum_matters() -> Evidence:
    x = _normal(1000).float()
    generator = torch.Generator().manual_seed(1)
    sums = {_one_after_another(x[torch.randperm(len(x), generator=generator)]) for _ in range(10)}
    return Evidence({"1000 normal numbers": len(sums) > 1}, {"different sums of ten orders": len(sums)})


@claim(
    "pairwise-sum",
    "The error of a pairwise sum grows much more slowly than that of adding one number after another.",
    SUMMATION,
    argument="Relative errors in float32 for positive numbers, at two lengths",
    expected=TRUE,
)
def pairwise_sums_are_more_accurate() -> Evidence:
    def pairwise(x: torch.Tensor) -> float:
        while len(x) > 1:
            x = x[::2] + x[1::2]
        return float(x)

    settings, figures = {}, dict[str, float]()
    for length in (1 << 10, 1 << 14):
        x = _normal(length).abs().float()
        exact = float(x.double().sum())
        chain, tree = (abs(total - exact) / exact for total in (_one_after_another(x), pairwise(x)))
        settings[f"{length} numbers"] = tree < chain / 3
        figures |= {f"error in turn, {length}": chain, f"error pairwise, {length}": tree}
    return Evidence(settings, figures)


@claim(
    "bf16-no-loss-scaling",
    "Training in fp16 needs loss scaling, training in bf16 does not.",
    BF16,
    argument="Gradients of different sizes, rounded to both types: which become zero",
    expected=TRUE,
)
def bf16_needs_no_loss_scaling() -> Evidence:
    sizes = (1e-8, 1e-12, 1e-20)
    settings = {}
    for size in sizes:
        x = torch.tensor(size, dtype=torch.float64)
        lost = {dtype: float(x.to(dtype)) == 0 for dtype in (torch.float16, torch.bfloat16)}
        settings[f"gradients of {size:g}"] = lost[torch.float16] and not lost[torch.bfloat16]
    return Evidence(
        settings, {"least fp16 above 0": 2.0**-24, "least normal bf16": torch.finfo(torch.bfloat16).tiny}
    )


@claim(
    "tf32-as-accurate",
    "TF32 is as accurate as float32, since it has the same range.",
    COMMON,
    argument="Error of a product whose factors are rounded to ten bits, over the error in float32",
    expected=FALSE,
)
def tf32_is_as_accurate() -> Evidence:
    def to_tf32(x: torch.Tensor) -> torch.Tensor:
        mantissa, exponent = torch.frexp(x)
        scale = 2.0 ** (TF32_BITS + 1)
        return torch.ldexp(torch.round(mantissa * scale) / scale, exponent)

    settings, figures = {}, dict[str, float]()
    for n in (64, 256):
        a, b = _normal(n, n).float(), _normal(n, n, seed=1).float()
        error = fast_matmul.relative_error(a @ b, a, b)
        rounded = fast_matmul.relative_error(to_tf32(a) @ to_tf32(b), a, b)
        settings[f"n = {n}"] = rounded < 2 * error
        figures |= {f"error in fp32, n = {n}": error, f"error in tf32, n = {n}": rounded}
    return Evidence(settings, figures)


@claim(
    "strassen-unstable",
    "Strassen's product is numerically unstable.",
    ACCURACY,
    argument="Errors in float32 over those of the usual product: the largest error over the largest "
    "element, and the relative error of small elements beside large ones",
    expected=DEPENDS,
)
def strassen_is_unstable() -> Evidence:
    strassen, n = fast_matmul.scheme("strassen"), 128
    a, b = _normal(n, n).float(), _normal(n, n, seed=1).float()
    growth = fast_matmul.relative_error(fast_matmul.multiply(a, b, strassen, 3), a, b)
    growth /= fast_matmul.relative_error(a @ b, a, b)
    # One half of the rows of a and of the columns of b is small: so is a quarter of the product.
    scale = torch.where(torch.arange(n) < n // 2, 1.0, 1e-4)
    small_a, small_b = a * scale[:, None], b * scale
    exact = (small_a.double() @ small_b.double())[n // 2 :, n // 2 :]

    def small_error(product: torch.Tensor) -> float:
        return float((product.double()[n // 2 :, n // 2 :] - exact).abs().max() / exact.abs().max())

    small = small_error(fast_matmul.multiply(small_a, small_b, strassen, 1)) / small_error(small_a @ small_b)
    settings = {
        "the largest error, three levels": growth > 100,
        "small elements beside large ones": small > 100,
    }
    return Evidence(settings, {"growth of the largest error": growth, "growth for small elements": small})


@claim(
    "strassen-pays-at-100",
    "Strassen's method is faster from matrices of about 100 rows on.",
    COMMON,
    argument="Crossover of one level of Winograd's form on each GPU: (saved FLOPs / rate) against (bytes "
    "of 15 additions / bandwidth)",
    expected=FALSE,
)
def strassen_pays_from_100_rows() -> Evidence:
    winograd = fast_matmul.scheme("winograd")
    settings, figures = {}, {}
    for key in ("a100-sxm-80gb", "h100-sxm", "h200", "rtx-4090"):
        gpu = specs.one(key)
        for rate in ("bf16", "fp32"):
            item = int(specs.ITEM_BYTES[rate])
            n = fast_matmul.crossover(winograd, gpu.rate(rate) or 0, gpu.bandwidth, item)
            settings[f"{key}, {rate}"] = n < 200
            figures[f"n, {key}, {rate}"] = n
    return Evidence(settings, figures)


@claim(
    "winograd-15-additions",
    "2 x 2 matrices can be multiplied by 7 multiplications and 15 additions.",
    Source("Shmuel Winograd", "On multiplication of 2 x 2 matrices", 1971),
    argument="The scheme's factors give the product exactly, by integers; additions with shared sums are "
    "counted",
    expected=TRUE,
)
def winograd_needs_15_additions() -> Evidence:
    scheme = fast_matmul.scheme("winograd")  # verified
    settings = {"over the integers": (scheme.rank, sum(scheme.additions)) == (7, 15)}
    figures = {"multiplications": scheme.rank, "additions": sum(scheme.additions)}
    return Evidence(settings, figures | {"additions, not shared": scheme.plain_additions})


@claim(
    "fp8-range-enough",
    "E4M3 has enough range for activations without a scale.",
    COMMON,
    argument="Share of normal numbers of different sizes that become zero or exceed 448",
    expected=DEPENDS,
)
def fp8_range_is_enough() -> Evidence:
    settings, figures = {}, {}
    for size in (1e-3, 1.0, 100.0, 1000.0):
        x = _normal(20000) * size
        largest = torch.finfo(torch.float8_e4m3fn).max
        lost = (x.float().to(torch.float8_e4m3fn).float() == 0) | (x.abs() > largest)
        share = float(lost.double().mean())
        settings[f"deviation {size:g}"] = share < 0.01
        figures[f"share lost, deviation {size:g}"] = share
    return Evidence(settings, figures)


@claim(
    "bf16-weights-suffice",
    "bf16 weights can be trained without a master copy in float32.",
    COMMON,
    argument="Updates of different relative sizes, added a hundred times to weights in bf16 with rounding "
    "to nearest",
    expected=DEPENDS,
)
def bf16_weights_suffice() -> Evidence:
    settings, figures = {}, {}
    for size in (1e-2, 1e-3):
        weight = torch.full((), 1.3, dtype=torch.bfloat16)
        for _ in range(100):
            weight = weight + torch.tensor(1.3 * size, dtype=torch.bfloat16)
        reached = (float(weight) / float(torch.tensor(1.3, dtype=torch.bfloat16)) - 1) / (100 * size)
        settings[f"updates of {size:g} of a weight"] = reached > 0.5
        figures[f"share of the updates that arrives, {size:g}"] = reached
    return Evidence(settings, figures)
