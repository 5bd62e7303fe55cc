"""Dispatch: which implementation a call gets, by a table of points measured on this device.

A point is a case that was timed: operator, dtype, elements in all, last dimension, and the times of
those that passed there. A call gets the choice of the nearest measured size, nearest in the last
dimension first. Ours is chosen only where it was measured to be faster; torch's own elsewhere, on
a CPU, and where nothing like the call was measured. ``weft tune`` makes and extends tables.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from weft.backends import support
from weft.core import BACKWARD, FORWARD, Case, Input, WeftError, registry
from weft.machine.ceilings import cache_folder

SHIPPED = Path(__file__).with_name("tables")
FORMAT = 1
BASE = ("torch", "eager")
WON = 0.99  # of the base's time: what ours must beat, so that noise chooses nothing
LOST = 1.02  # of the base's time: what ours may never take, in either direction, or on the host
WAY = 5.0  # us of host time allowed for the way to a kernel of ours, each direction
FAR_LAST, FAR_SMALL = 8.0, 16.0  # times from the nearest measured size, past which nothing is known
Bands = tuple[tuple[float, tuple[tuple[float, str], ...]], ...]
Times = Mapping[str, tuple[float, float]]  # of an implementation: cold and host, in us


Function = TypeVar("Function", bound=Callable[..., Any])


def settled_while_tracing(function: Function) -> Function:
    """Run for real by ``torch.compile``, whose graph has the answer as a constant.

    The mark of ``torch.compiler.assume_constant_result``, which imports all of the compiler to put
    it there: half of what importing Weft's operators would take.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, kw_only=True)
class Point:
    """What was measured at one size. ``flags`` are the case's words and switches, as pairs."""

    operator: str
    case: str
    dtype: str
    elements: int
    last: int
    flags: tuple[tuple[str, object], ...]
    forward: Times
    backward: Times

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Point:
        def times(of: Mapping[str, Sequence[float]]) -> Times:
            return {name: (float(t[0]), float(t[1])) for name, t in of.items()}

        own = {k: data[k] for k in ("operator", "case", "dtype", "elements", "last")}
        return Point(
            flags=tuple(sorted(data["flags"].items())),
            forward=times(data["forward"]),
            backward=times(data["backward"]),
            **own,
        )

    def to_json(self) -> dict[str, Any]:
        data = {k: getattr(self, k) for k in ("operator", "case", "dtype", "elements", "last")}
        times = {k: {n: list(t) for n, t in getattr(self, k).items()} for k in (FORWARD, BACKWARD)}
        return data | {"flags": dict(self.flags)} | times


def slug(device: str) -> str:
    """A device's name as a file's: lower case, dashes between the words."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unknown"


def own_table(device: str) -> Path:
    """Where ``weft tune`` keeps what it measured on this machine's device."""
    return cache_folder() / "dispatch" / f"{slug(device)}.json"


def read(path: Path) -> list[Point]:
    """A table's points; raises :class:`WeftError` on what ``weft tune`` did not write."""
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise WeftError("dispatch table", expected=f"format {FORMAT}", got=data["format"])
        return [Point.from_json(p) for p in data["points"]]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, IndexError) as error:
        hint = "remove it, or write it anew: weft tune"
        raise WeftError(f"not a dispatch table: {path}", got=repr(error), hint=hint) from error


@cache
def points(device: str) -> tuple[Point, ...]:
    """What is known of a device: the shipped table, and over it what was measured here."""
    found: dict[tuple[str, str], Point] = {}
    for path in (SHIPPED / f"{slug(device)}.json", own_table(device)):
        if path.exists():
            found |= {(p.operator, p.case): p for p in read(path)}
    return tuple(found.values())


def best(point: Point, grad: bool) -> str:
    """The implementation to run at a point; with ``grad`` one for both directions.

    Ours must be faster than the better of eager and torch by what noise cannot explain, at no
    direction slower, and no slower back to back, where the host's time may be what counts.
    """
    directions = [point.forward, point.backward] if grad else [point.forward]
    names = [n for n in directions[0] if all(n in times for times in directions)]
    base = [n for n in BASE if n in names]
    if not base:
        return fallback(point.operator)

    def cold(name: str) -> float:
        return sum(times[name][0] for times in directions)

    least = min(base, key=cold)
    least = base[0] if cold(base[0]) <= LOST * cold(least) else least

    def paced(name: str) -> float:
        # Device and host go side by side through both directions. A record has autograd's own host
        # time for torch alone, and ours takes it too.
        if name in BASE:
            host = sum(times[name][1] for times in directions)
        else:
            host = directions[0][name][1] + WAY
            host += sum(max(t[name][1], t[least][1]) + WAY for t in directions[1:])
        return max(cold(name), host)

    ours = [
        n
        for n in names
        if n not in BASE
        and all(t[n][0] <= LOST * min(t[b][0] for b in base) for t in directions)
        and cold(n) <= WON * min(map(cold, base))
        and paced(n) <= LOST * paced(least)
    ]
    return min(ours, key=cold, default=least)


@cache
def bands(
    name: str, device: str, dtype: str, flags: tuple[tuple[str, object], ...], grad: bool
) -> Bands:
    """The choices for an operator: bands of the last dimension, in each bands of elements.

    Each is (below what, ...), the borders halfway between measured sizes on a logarithmic scale.
    """
    asked = dict(flags)
    known = [
        p
        for p in points(device)
        if (p.operator, p.dtype) == (name, dtype)
        and all(asked.get(k, v) == v for k, v in p.flags)
        and (p.backward or not grad)
    ]
    other = fallback(name)
    lasts = sorted({p.last for p in known})
    found: list[tuple[float, tuple[tuple[float, str], ...]]] = []
    if lasts:
        found.append((lasts[0] / FAR_LAST, ((math.inf, other),)))
    for i, last in enumerate(lasts):
        upper = _between(last, lasts[i + 1]) if i + 1 < len(lasts) else last * FAR_LAST
        here = {p.elements: p for p in known if p.last == last}
        sizes = sorted(here)
        inner = [(sizes[0] / FAR_SMALL, other)]
        for j, size in enumerate(sizes):
            border = _between(size, sizes[j + 1]) if j + 1 < len(sizes) else math.inf
            inner.append((border, best(here[size], grad)))
        found.append((upper, tuple(inner)))
    return (*found, (math.inf, ((math.inf, other),)))


def _between(low: float, high: float) -> float:
    return math.sqrt(max(low, 0.5) * high)


@cache
def fallback(name: str) -> str:
    """torch's own, or where it has none, what is composed of its calls."""
    return next(b for b in BASE if b in registry.implementation_names(name))


def look_up(table: Bands, elements: int, last: int) -> str:
    """The choice for a size; comparisons alone, so that a traced size stays symbolic."""
    for upper, inner in table:
        if last < upper:
            for border, impl in inner:
                if elements < border:
                    return impl
    raise AssertionError("the last band is open")


@cache
def device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@settled_while_tracing
def _traced_bands(
    name: str, index: int | None, dtype: torch.dtype, words: tuple[Any, ...], grad: bool
) -> Bands:
    return _bands_of(name, index, dtype, words, grad)


def _bands_of(
    name: str, index: int | None, dtype: torch.dtype, words: tuple[Any, ...], grad: bool
) -> Bands:
    device = device_name(torch.cuda.current_device() if index is None else index)
    return bands(name, device, str(dtype).removeprefix("torch."), words, grad)


def pick(name: str, device: torch.device, dtype: torch.dtype, elements: int, last: int) -> str:
    """The choice for a forward-only call that is described by its size."""
    if device.type != "cuda":
        return fallback(name)
    return look_up(_bands_of(name, device.index, dtype, (), False), elements, last)


REMEMBERED = 4096  # kinds of calls
_remembered: dict[tuple[Any, ...], Any] = {}
SEEDS = 1 << 63
Made = TypeVar("Made")


def recalled(
    of: tuple[Any, ...], inputs: Sequence[Any], params: Mapping[str, Any], make: Callable[[], Made]
) -> Made:
    """What ``make`` gave when it was first asked for such a call: one dictionary lookup.

    Calls are alike in ``of``, in the tensors' shapes, dtypes, layouts and devices, in whether a
    gradient is wanted, and in the parameters, seeds apart. What holds no such thing, or a parameter
    that cannot be a key, is made each time.
    """
    parts: list[Any] = [*of]
    wanted = False
    try:
        for x in inputs:
            if x is None:
                parts.append(None)
            else:
                parts += (x.shape, x.dtype, x.layout, x.device)
                wanted = wanted or x.requires_grad
        for name, value in params.items():
            # One that is out of range is none of those that were validated.
            known = name == "seed" and type(value) is int and 0 <= value < SEEDS
            parts.append("seed" if known else value)
        key = (wanted and torch.is_grad_enabled(), *parts)
        found = _remembered.get(key)
    except (AttributeError, TypeError):
        return make()
    if found is None:
        if len(_remembered) >= REMEMBERED:
            _remembered.clear()
        found = _remembered[key] = make()
    return found  # type: ignore[no-any-return]


def choose(name: str, inputs: Sequence[Any], params: Mapping[str, Any]) -> str:
    """The name of the implementation for this call.

    ``inputs`` are tensors (None for one left out), validated; the first that is on a GPU says which
    device's table counts. Under ``torch.compile`` the choice is made while tracing; a symbolic size
    is compared with the table's borders alone, so that crossing one traces anew.
    """
    tensors = [x for x in inputs if x is not None]
    if torch.compiler.is_compiling():
        return _traced(name, [x for x in tensors if isinstance(x, torch.Tensor)], params)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return _decide(name, tensors, params, grad)


def _traced(name: str, tensors: Sequence[torch.Tensor], params: Mapping[str, Any]) -> str:
    if tensors[0].device.type != "cuda":
        return _traced_fallback(name)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    main = _main(tensors)
    found = _traced_bands(name, main.device.index, _dtype(tensors), words_of(params), grad)
    return look_up(found, sum([x.numel() for x in tensors]), _last(main))


@settled_while_tracing
def _traced_fallback(name: str) -> str:
    return fallback(name)


def _decide(
    name: str, tensors: Sequence[torch.Tensor], params: Mapping[str, Any], grad: bool
) -> str:
    """The table's choice where it runs and takes the call; else torch's own, else eager."""
    wanted = [fallback(name), "eager"]
    device = tensors[0].device
    if device.type == "cuda":
        main = _main(tensors)
        table = _bands_of(name, main.device.index, _dtype(tensors), words_of(params), grad)
        wanted.insert(0, look_up(table, sum(x.numel() for x in tensors), _last(main)))
    names = [i.name for i in registry.operator(name).cases[0].inputs]
    names += [f"input{i}" for i in range(len(names), len(tensors))]
    described = tuple(
        Input(name=n, shape=tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."))
        for n, x in zip(names, tensors, strict=False)
    )
    point = Case(name="call", inputs=described, params=params)
    directions = (FORWARD, BACKWARD) if grad else (FORWARD,)
    for impl in wanted:
        if impl not in registry.implementation_names(name):
            continue
        found = registry.implementation(name, impl)
        if all(support(found, point, device.type, d) for d in directions):
            return impl
    return wanted[-2]  # refused there with its reason


def words_of(params: Mapping[str, Any]) -> tuple[tuple[str, object], ...]:
    """The parameters that a measured case must share: words and switches, not numbers."""
    return tuple(sorted([(k, v) for k, v in params.items() if isinstance(v, str | bool)]))


def _main(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest input, whose last dimension counts; the first of equals."""
    found = tensors[0]
    for x in tensors[1:]:
        if x.numel() > found.numel():
            found = x
    return found


def _last(x: torch.Tensor) -> int:
    return x.shape[-1] if x.dim() else 1


def _dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """That of the first floating-point input."""
    for x in tensors:
        if x.dtype.is_floating_point:
            return x.dtype
    return tensors[0].dtype


def described(inputs: Iterable[Input]) -> tuple[str, int, int]:
    """dtype, elements and last dimension of a case, as a call with these inputs is looked up."""
    given = list(inputs)
    main = max(given, key=lambda i: i.numel)
    floating = [i.dtype for i in given if "float" in i.dtype]
    last = main.shape[-1] if main.shape else 1
    return (floating or [main.dtype])[0], sum(i.numel for i in given), last


def forget() -> None:
    """Drop what was read and chosen, after a table changed."""
    caches: tuple[Callable[..., Any], ...] = (points, bands)
    for one in caches:
        one.cache_clear()  # type: ignore[attr-defined]
    _remembered.clear()
