"""Small kernels that must fail the check, and honest ones that must pass; they run on any machine.

The ids number the known faults (W) and cheats (C). Each kernel computes one of four toy operators:
softmax and normalisation of rows, GELU, and the sum of all elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from helpers.toys import (
    EMPTY,
    EPS,
    FLIPPED,
    GAPPED,
    GELU,
    HALF,
    LARGE,
    LONG,
    LOOSE,
    NORM,
    OFFSET,
    PLAIN,
    RISING,
    SCALAR,
    SOFTMAX,
    SPECIAL,
    TOTAL,
    at,
    gelu,
    softmax,
)
from weft.core import BACKWARD, FORWARD, Case, Implementation, Operator


@dataclass
class Planted:
    """Candidate that is created for each check; ``rule`` names the rule that must refuse it.

    With two rules, separated by a bar, either may refuse it first, depending on the machine.
    """

    id: str
    make: Callable[[], Callable[..., object]]
    rule: str
    operator: Operator = SOFTMAX
    case: Case = PLAIN
    direction: str = FORWARD
    deterministic: bool = True

    def implementation(self) -> Implementation:
        function = self.make()
        backward = function if self.direction == BACKWARD else None
        return Implementation(
            operator=self.operator.name,
            name=self.id,
            backend="eager",
            forward=self.operator.reference if backward else function,
            backward=backward,  # type: ignore[arg-type]
            deterministic=self.deterministic,
        )


def _pure(function: Callable[..., object]) -> Callable[[], Callable[..., object]]:
    return lambda: function


def _skips_last_tile(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    y[:32] = softmax(x[:32])
    return y


def _copies_row_0(x: torch.Tensor) -> torch.Tensor:
    y = softmax(x)
    y[36:] = y[0]
    return y


def _loads_past_the_end(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((-(-x.numel() // 1024) * 1024,), (1,)).sum()


def _stores_past_the_end(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    y.as_strided((5 * 1024,), (1,)).zero_()
    return y.copy_(softmax(x))


def _stores_past_the_input(x: torch.Tensor) -> torch.Tensor:
    x.as_strided((1,), (1,), x.storage_offset() + x.numel()).zero_()
    return softmax(x)


def _any_strides(x: torch.Tensor) -> torch.Tensor:
    return softmax(x.as_strided(x.shape, (x.shape[1], 1)))


def _half_accumulation(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    part = torch.zeros_like(e[:, 0])
    for column in e.unbind(1):
        part = part + column
    return e / part[:, None]


def _coarse(x: torch.Tensor) -> torch.Tensor:
    return softmax(x.bfloat16().float())


def _no_maximum(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def _online_without_rescale(x: torch.Tensor) -> torch.Tensor:
    sums, top = torch.zeros_like(x[:, :1]), torch.full_like(x[:, :1], -math.inf)
    for piece in x.split(32, 1):
        top = torch.maximum(top, piece.amax(1, keepdim=True))
        sums = sums + torch.exp(piece - top).sum(1, keepdim=True)
    return torch.exp(x - top) / sums


def _no_eps(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True))


def _one_less(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().sum(-1, keepdim=True) / 128 + EPS)


def _difference_of_squares(x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) / torch.sqrt(variance.abs() + EPS)


def _swallows_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(gelu(x))


def _textbook_tanh(x: torch.Tensor) -> torch.Tensor:
    a = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    e = torch.exp(2 * a)
    return 0.5 * x * (1 + (e - 1) / (e + 1))


def _not_zeroed() -> Callable[..., object]:
    buffer = torch.zeros(())

    def forward(x: torch.Tensor) -> torch.Tensor:
        buffer.add_(x.sum())
        return buffer.clone()

    return forward


def _skips_tenth() -> Callable[..., object]:
    calls = itertools.count(1)
    return lambda x: torch.empty_like(x) if next(calls) == 10 else softmax(x)


def _fails_when_small(x: torch.Tensor) -> torch.Tensor:
    if not x.numel():
        raise ValueError("grid must be positive")
    return softmax(x)


def _odd_only(x: torch.Tensor) -> torch.Tensor:
    y = softmax(x)
    if x.shape[-1] % 2:
        y[:, -1] = 0
    return y


def _zeroes_its_input(x: torch.Tensor) -> torch.Tensor:
    y = softmax(x)
    x.zero_()
    return y


def _ignores_a_failed_launch(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    try:
        raise RuntimeError("CUDA error: invalid configuration argument")
    except RuntimeError:
        return y


def _exits(x: torch.Tensor) -> torch.Tensor:
    raise SystemExit(0)


def _part_nan(x: torch.Tensor) -> torch.Tensor:
    y = softmax(x)
    y[3, 5:9] = math.nan
    return y


def _cached(key: Callable[[torch.Tensor], object]) -> Callable[[], Callable[..., object]]:
    def make() -> Callable[..., object]:
        cache: dict[object, torch.Tensor] = {}
        return lambda x: cache.setdefault(key(x), softmax(x)).clone()

    return make


def _one_buffer() -> Callable[..., object]:
    buffer: list[torch.Tensor] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not buffer:
            buffer.append(torch.zeros(x.shape))
        return buffer[0].copy_(softmax(x))

    return forward


class Lazy(torch.Tensor):
    """Tensor subclass, which could compute its elements only when they are read."""


def _jitters() -> Callable[..., object]:
    calls = itertools.count()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = softmax(x)
        return torch.nextafter(y, torch.ones_like(y)) if next(calls) % 2 else y

    return forward


def _by_address() -> Callable[..., object]:
    seen: set[int] = set()

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.add(x.data_ptr())
        y = softmax(x)
        return torch.nextafter(y, torch.ones_like(y)) if len(seen) > 1 else y

    return forward


def _small_elements_zero(x: torch.Tensor) -> torch.Tensor:
    y = softmax(x)
    return torch.where(y < 1e-12 * y.amax(), 0.0, y)


def _swallows_poison(x: torch.Tensor) -> torch.Tensor:
    past = x.as_strided((1,), (1,), x.storage_offset() + x.numel())
    top = torch.fmax(x.amax(-1, keepdim=True), past)
    e = torch.exp(x - top)
    return e / e.sum(-1, keepdim=True)


def _gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = softmax(x)
    return y * (grad - (grad * y).sum(-1, keepdim=True))


def _spoils_saved(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    result = _gradient(grad, x)
    grad.zero_()
    return (result,)


WRONG = [
    Planted("W01 launches nothing", _pure(torch.empty_like), "written"),
    Planted("W02 zeros", _pure(torch.zeros_like), "error"),
    Planted("W02 a constant", _pure(lambda x: torch.full_like(x, 1 / 129)), "error"),
    Planted("W02 the mean", _pure(lambda x: x.mean(-1, keepdim=True) + 0 * x), "error", NORM),
    Planted("W03 its input", _pure(lambda x: x), "alias"),
    Planted("W03 a view of it", _pure(lambda x: x.view_as(x)), "alias"),
    Planted("W03 a copy of it", _pure(torch.clone), "error"),
    Planted("W04 skips the last tile", _pure(_skips_last_tile), "written"),
    Planted("W04 copies row 0", _pure(_copies_row_0), "error"),
    Planted("W05 no mask on the load", _pure(_loads_past_the_end), "written|special", TOTAL),
    Planted("W05 no mask on the store", _pure(_stores_past_the_end), "guards"),
    Planted("W05 stores past its input", _pure(_stores_past_the_input), "guards"),
    Planted("W06 transposed as contiguous", _pure(_any_strides), "error", case=FLIPPED),
    Planted("W06 gaps as elements", _pure(_any_strides), "special", case=GAPPED),
    Planted("W08 half accumulation", _pure(_half_accumulation), "error|drift", case=LONG),
    Planted("W08 bf16 inside", _pure(_coarse), "error"),
    Planted("W09 no maximum", _pure(_no_maximum), "special", case=LARGE),
    Planted("W09 no rescale", _pure(_online_without_rescale), "error", case=RISING),
    Planted("W10 no eps", _pure(_no_eps), "error", NORM),
    Planted("W10 N - 1", _pure(_one_less), "error", NORM),
    Planted("W11 E[x^2] - E[x]^2", _pure(_difference_of_squares), "error", NORM, OFFSET),
    Planted("W12 swallows NaN", _pure(_swallows_nan), "special", GELU, SPECIAL),
    Planted("W12 clamps Inf", _pure(lambda x: gelu(x).clamp(max=3e38)), "special", GELU, SPECIAL),
    Planted("W13 textbook tanh", _pure(_textbook_tanh), "special", GELU, at(999, values="sweep")),
    Planted("W15 buffer not zeroed", _not_zeroed, "error", TOTAL),
    Planted("W16 skips the tenth call", _skips_tenth, "written"),
    Planted("W18 fails at size 0", _pure(_fails_when_small), "returns", case=EMPTY),
    Planted("W18 fails at 0-d", _pure(lambda x: torch.softmax(x, 1)), "returns", case=SCALAR),
    Planted("W19 wrong dtype", _pure(lambda x: softmax(x).double()), "dtype"),
    Planted("W19 a shape that broadcasts", _pure(lambda x: softmax(x)[None]), "shape"),
    Planted("W19 wrong device", _pure(lambda x: softmax(x).to("meta")), "device"),
    Planted("W19 wrong layout", _pure(lambda x: softmax(x).t().contiguous().t()), "layout"),
    Planted("W20 zeroes its input", _pure(_zeroes_its_input), "inputs"),
    Planted("W21 ignores a failed launch", _pure(_ignores_a_failed_launch), "written"),
    Planted("W24 NaN over a part", _pure(_part_nan), "special"),
    Planted("W25 zeros for small elements", _pure(_small_elements_zero), "local", case=RISING),
    Planted("C01 caches by address", _cached(lambda x: x.data_ptr()), "error"),
    Planted("C01 caches by id", _cached(id), "error"),
    Planted("C01 caches by shape", _cached(lambda x: x.shape), "error"),
    Planted("C01 caches by version", _cached(lambda x: (x.data_ptr(), x._version)), "error"),
    Planted("C07 a lazy subclass", _pure(lambda x: softmax(x).as_subclass(Lazy)), "type"),
    Planted("odd sizes only", _pure(_odd_only), "error"),
    Planted("one buffer for all answers", _one_buffer, "kept"),
    Planted("exits", _pure(_exits), "returns"),
    Planted("returns a float", _pure(lambda x: 1.0), "type"),
    Planted("other bits each call", _jitters, "repeats"),
    Planted("other bits elsewhere", _by_address, "again"),
    Planted("swallows the poison", _pure(_swallows_poison), "special"),
    Planted("rows sum to 1.0001", _pure(lambda x: softmax(x) * 1.0001), "property", LOOSE),
    Planted(
        "W22 wrong backward",
        _pure(lambda g, x: (g * softmax(x),)),
        "error",
        direction=BACKWARD,
    ),
    Planted("W22 None", _pure(lambda g, x: (None,)), "type", direction=BACKWARD),
    Planted("W22 no tuple", _pure(_gradient), "type", direction=BACKWARD),
    Planted("W22 the gradient itself", _pure(lambda g, x: (g,)), "alias", direction=BACKWARD),
    Planted("W20 spoils the gradient", _pure(_spoils_saved), "inputs", direction=BACKWARD),
]

HONEST = [
    Planted("wraps eager", _pure(softmax), ""),
    Planted("torch", _pure(lambda x: torch.softmax(x, -1)), ""),
    Planted("large", _pure(softmax), "", case=LARGE),
    Planted("special", _pure(gelu), "", GELU, SPECIAL),
    Planted("fills a buffer", _pure(lambda x: torch.empty_like(x).copy_(softmax(x))), ""),
    Planted("fp32 inside", _pure(lambda x: torch.softmax(x.float(), -1).half()), "", case=HALF),
    Planted("nondeterministic", _jitters, "", deterministic=False),
    Planted("about 0", _pure(lambda x: x.double().sum().float()), "", TOTAL),
    Planted("empty", _pure(softmax), "", case=EMPTY),
    Planted("0-d", _pure(softmax), "", case=SCALAR),
    Planted("gapped", _pure(softmax), "", case=GAPPED),
    Planted("by hand", _pure(lambda g, x: (_gradient(g, x),)), "", direction=BACKWARD),
    Planted("broadcast", _pure(lambda g, x: (g.expand(x.shape),)), "", TOTAL, direction=BACKWARD),
]
