"""Choice by measurement: which implementation a call gets.

A table holds points that were measured on one kind of device. A point is one case: operator, dtype, number
of elements, length of the last dimension, and the times of the implementations that passed there. A call
gets the choice of the nearest measured size: nearest in the last dimension first, then in elements. One of
our implementations is chosen only where it was measured to be faster. PyTorch's own is chosen elsewhere:
on a CPU, and where nothing like the call was measured. ``weft tune`` makes and extends tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from weft.backends import support
from weft.core import BACKWARD, FORWARD, Case, Input, WeftError, registry
from weft.core.json_files import read_json
from weft.core.text import slug
from weft.machine.ceilings import cache_folder

SHIPPED = Path(__file__).with_name("tables")
FORMAT = 1
BASELINES = ("torch", "eager")
MUST_BEAT = 0.99  # of the baseline's time: ours must be below it, so that noise never decides
MAY_LOSE = 1.02  # of the baseline's time: ours must stay below it in each direction and on the host
DISPATCH_US = 5.0  # host time in us allowed for Weft's own dispatch, in each direction
# Beyond these factors from the nearest measured size nothing is known, and PyTorch's own is taken.
FAR_LAST, FAR_SMALL = 8.0, 16.0
# (upper end of the last dimension, ((upper end of the elements, implementation), ...)), ascending
Bands = tuple[tuple[float, tuple[tuple[float, str], ...]], ...]
Times = Mapping[str, tuple[float, float]]  # implementation -> (cold time, host time) in us

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_while_tracing(function: Function) -> Function:
    """Make ``torch.compile`` run ``function`` for real and keep its result as a constant of the graph.

    This sets the same mark as ``torch.compiler.assume_constant_result``, which imports the whole compiler
    to do so: half of the time that importing Weft's operators would take.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# ---- Tables


@dataclass(frozen=True, kw_only=True)
class Point:
    """Measurements at one size. ``flags`` are the case's strings and booleans, as sorted pairs."""

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
        def times(by_name: Mapping[str, Sequence[float]]) -> Times:
            return {name: (float(t[0]), float(t[1])) for name, t in by_name.items()}

        fields = {k: data[k] for k in ("operator", "case", "dtype", "elements", "last")}
        return Point(
            flags=tuple(sorted(data["flags"].items())),
            forward=times(data["forward"]),
            backward=times(data["backward"]),
            **fields,
        )

    def to_json(self) -> dict[str, Any]:
        data = {k: getattr(self, k) for k in ("operator", "case", "dtype", "elements", "last")}
        times = {k: {n: list(t) for n, t in getattr(self, k).items()} for k in (FORWARD, BACKWARD)}
        return data | {"flags": dict(self.flags)} | times


def own_table(device: str) -> Path:
    """Return the path where ``weft tune`` keeps what it measured on this machine's device."""
    return cache_folder() / "dispatch" / f"{slug(device)}.json"


def read(path: Path) -> list[Point]:
    """Read a table's points. Raises :class:`WeftError` if ``weft tune`` did not write the file."""
    try:
        data = read_json(path)
        if data["format"] != FORMAT:
            raise WeftError("dispatch table", expected=f"format {FORMAT}", got=data["format"])
        return [Point.from_json(p) for p in data["points"]]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        hint = "remove it, or write a new one: weft tune"
        raise WeftError(f"not a dispatch table: {path}", got=repr(error), hint=hint) from error


@cache
def points(device: str) -> tuple[Point, ...]:
    """Return all points of a device: the shipped table, overridden by what was measured here."""
    by_case: dict[tuple[str, str], Point] = {}
    for path in (SHIPPED / f"{slug(device)}.json", own_table(device)):
        if path.exists():
            # The user's table comes second: a case measured on this machine replaces the shipped one.
            by_case |= {(p.operator, p.case): p for p in read(path)}
    return tuple(by_case.values())


# ---- From times to a choice


@cache
def fallback(name: str) -> str:
    """Return PyTorch's own implementation, or ``eager`` for an operator that PyTorch does not have."""
    return next(b for b in BASELINES if b in registry.implementation_names(name))


def best(point: Point, grad: bool) -> str:
    """Return the implementation to run at a point; with ``grad``, one for both directions.

    Ours must beat the better of eager and torch by more than noise explains, lose in no direction, and
    lose no time when calls run back to back, where the host may be what limits them.
    """
    directions = [point.forward, point.backward] if grad else [point.forward]
    # An implementation that failed or is missing in one direction is not a candidate for both.
    names = [n for n in directions[0] if all(n in times for times in directions)]
    baselines = [n for n in BASELINES if n in names]
    if not baselines:
        return fallback(point.operator)

    def cold(name: str) -> float:
        return sum(times[name][0] for times in directions)

    baseline = min(baselines, key=cold)
    # torch is preferred to eager within the noise: one call of the library instead of several.
    if cold(baselines[0]) <= MAY_LOSE * cold(baseline):
        baseline = baselines[0]

    def back_to_back(name: str) -> float:
        # Device and host run side by side through both directions. A record holds autograd's own host
        # time for torch alone, so ours is charged at least torch's.
        if name in BASELINES:
            host = sum(times[name][1] for times in directions)
        else:
            host = directions[0][name][1] + DISPATCH_US
            host += sum(max(t[name][1], t[baseline][1]) + DISPATCH_US for t in directions[1:])
        return max(cold(name), host)

    ours = [
        n
        for n in names
        if n not in BASELINES
        and all(t[n][0] <= MAY_LOSE * min(t[b][0] for b in baselines) for t in directions)
        and cold(n) <= MUST_BEAT * min(map(cold, baselines))
        and back_to_back(n) <= MAY_LOSE * back_to_back(baseline)
    ]
    return min(ours, key=cold, default=baseline)


@cache
def bands(name: str, device: str, dtype: str, flags: tuple[tuple[str, object], ...], grad: bool) -> Bands:
    """Return an operator's choices as bands of the last dimension, each with bands of elements.

    The border between two measured sizes is halfway between them on a logarithmic scale.
    """
    call_flags = dict(flags)
    matching = [
        p
        for p in points(device)
        if (p.operator, p.dtype) == (name, dtype)
        and all(call_flags.get(k, v) == v for k, v in p.flags)
        and (p.backward or not grad)
    ]
    # Outside of all bands the answer is PyTorch's own: an unmeasured size must not become slower than torch.
    other = fallback(name)
    lasts = sorted({p.last for p in matching})
    result: list[tuple[float, tuple[tuple[float, str], ...]]] = []
    if lasts:
        # Below the shortest measured row by more than FAR_LAST, nothing is known.
        result.append((lasts[0] / FAR_LAST, ((math.inf, other),)))
    for i, last in enumerate(lasts):
        upper = _border(last, lasts[i + 1]) if i + 1 < len(lasts) else last * FAR_LAST
        # Points of other flags with the same size replace each other: the last one in the table counts.
        by_elements = {p.elements: p for p in matching if p.last == last}
        sizes = sorted(by_elements)
        inner = [(sizes[0] / FAR_SMALL, other)]
        for j, size in enumerate(sizes):
            # No upper limit in elements: more rows of the same length only fill the device better.
            border = _border(size, sizes[j + 1]) if j + 1 < len(sizes) else math.inf
            inner.append((border, best(by_elements[size], grad)))
        result.append((upper, tuple(inner)))
    return (*result, (math.inf, ((math.inf, other),)))


def _border(low: float, high: float) -> float:
    # The geometric mean. 0.5 stands for a size of 0, which has no logarithm.
    return math.sqrt(max(low, 0.5) * high)


def look_up(table: Bands, elements: int, last: int) -> str:
    """Return the choice for a size. It only compares, so that a traced size stays symbolic."""
    for upper, inner in table:
        if last < upper:
            for border, impl in inner:
                if elements < border:
                    return impl
    raise AssertionError("the last band is open")


# ---- From a call to a choice


@dataclass(frozen=True)
class Decision:
    """Choice for a call: the operator, the implementation, and why, in words."""

    operator: str
    impl: str
    reason: str


_observers: list[Callable[[Decision], None]] = []


@contextmanager
def observed(observer: Callable[[Decision], None]) -> Iterator[None]:
    """Context that calls ``observer`` with each choice that is made, and not with those that are memoized."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def choose(name: str, inputs: Sequence[Any], params: Mapping[str, Any]) -> str:
    """Return the name of the implementation for this call.

    ``inputs`` are validated tensors, None for one that was left out. The device of the largest input says
    whose table counts. Under ``torch.compile`` the choice is made while tracing: a symbolic size is only
    compared with the table's borders, so that a size beyond a border traces again.
    """
    tensors = [x for x in inputs if x is not None]
    if torch.compiler.is_compiling():
        return _choose_traced(name, [x for x in tensors if isinstance(x, torch.Tensor)], params)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    impl, reason = _choose_supported(name, tensors, params, grad)
    for observer in _observers:
        observer(Decision(name, impl, reason))
    return impl


def choose_by_size(name: str, device: torch.device, dtype: torch.dtype, elements: int, last: int) -> str:
    """Return the choice for a forward-only call that is described by its size alone."""
    if device.type != "cuda":
        return fallback(name)
    return look_up(_device_bands(name, device.index, dtype, (), False), elements, last)


def _choose_supported(
    name: str, tensors: Sequence[torch.Tensor], params: Mapping[str, Any], grad: bool
) -> tuple[str, str]:
    """Return the table's choice if it supports the call, else PyTorch's own, else eager; and the reason."""
    # In this order: the table's choice, torch's own, and eager, which supports every call.
    candidates = [fallback(name), "eager"]
    reason = "PyTorch's own on a CPU"
    device = tensors[0].device
    if device.type == "cuda":
        reason = "the table's nearest band"
        main = _largest(tensors)
        table = _device_bands(name, main.device.index, _dtype(tensors), discrete_params(params), grad)
        candidates.insert(0, look_up(table, sum(x.numel() for x in tensors), _last(main)))
    case = call_case(name, tensors, params)
    directions = (FORWARD, BACKWARD) if grad else (FORWARD,)
    for impl in candidates:
        if impl not in registry.implementation_names(name):
            continue
        implementation = registry.implementation(name, impl)
        if all(support(implementation, case, device.type, d) for d in directions):
            if impl != candidates[0]:
                reason = f"{candidates[0]} does not support the call"
            return impl, reason
    return candidates[-2], "nothing supports the call"  # the caller refuses it with its reason


def call_case(name: str, tensors: Sequence[torch.Tensor], params: Mapping[str, Any]) -> Case:
    """Return a case made from a call, so that ``supports`` answers as it does in a check."""
    names = [i.name for i in registry.operator(name).cases[0].inputs]
    names += [f"input{i}" for i in range(len(names), len(tensors))]
    inputs = tuple(
        Input(name=n, shape=tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."))
        for n, x in zip(names, tensors, strict=False)
    )
    return Case(name="call", inputs=inputs, params=params)


def _choose_traced(name: str, tensors: Sequence[torch.Tensor], params: Mapping[str, Any]) -> str:
    if tensors[0].device.type != "cuda":
        return _traced_fallback(name)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    main = _largest(tensors)
    table = _traced_bands(name, main.device.index, _dtype(tensors), discrete_params(params), grad)
    return look_up(table, sum([x.numel() for x in tensors]), _last(main))


@constant_while_tracing
def _traced_bands(
    name: str, index: int | None, dtype: torch.dtype, flags: tuple[Any, ...], grad: bool
) -> Bands:
    return _device_bands(name, index, dtype, flags, grad)


@constant_while_tracing
def _traced_fallback(name: str) -> str:
    return fallback(name)


def _device_bands(
    name: str, index: int | None, dtype: torch.dtype, flags: tuple[Any, ...], grad: bool
) -> Bands:
    device = device_name(torch.cuda.current_device() if index is None else index)
    return bands(name, device, str(dtype).removeprefix("torch."), flags, grad)


@cache
def device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def discrete_params(params: Mapping[str, Any]) -> tuple[tuple[str, object], ...]:
    """Return the parameters that a measured case must share with a call: strings and booleans."""
    return tuple(sorted([(k, v) for k, v in params.items() if isinstance(v, str | bool)]))


def _largest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest input, whose last dimension counts; the first of equals."""
    largest = tensors[0]
    for x in tensors[1:]:
        if x.numel() > largest.numel():
            largest = x
    return largest


def _last(x: torch.Tensor) -> int:
    return x.shape[-1] if x.dim() else 1


def _dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the dtype of the first floating-point input."""
    for x in tensors:
        if x.dtype.is_floating_point:
            return x.dtype
    return tensors[0].dtype


def lookup_key(inputs: Iterable[Input]) -> tuple[str, int, int]:
    """Return dtype, elements and last dimension under which a call with these inputs is looked up."""
    specs = list(inputs)
    main = max(specs, key=lambda i: i.numel)
    floating = [i.dtype for i in specs if "float" in i.dtype]
    last = main.shape[-1] if main.shape else 1
    return (floating or [main.dtype])[0], sum(i.numel for i in specs), last


def clear_caches() -> None:
    """Drop the tables that were read and the bands that were made of them."""
    for cached in (points, bands):
        cached.cache_clear()
