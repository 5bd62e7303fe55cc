"""Choice by measurement: which implementation a call gets.

A table holds points that were measured on one kind of device: operator, dtype, the sizes that decide the time
(``keys.py``), flags, and the times of the implementations that passed there. A call gets the choice of the
nearest point, whose times are scaled to the call's sizes by a small model. One of our implementations is
chosen only where it is faster, by a margin that grows with the distance; PyTorch's own is chosen elsewhere:
on a CPU, and where nothing near the call was measured. A device without a table uses that of a device of its
architecture. ``weft tune`` makes and extends tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from weft.backends import support
from weft.core import BACKWARD, FORWARD, WeftError, registry
from weft.core.json_files import read_json
from weft.core.text import slug
from weft.dispatch import host_limits, keys
from weft.dispatch.devices import architecture, device_name
from weft.dispatch.host_limits import HostTimes
from weft.dispatch.keys import Flags, Grid, Sizes
from weft.machine.ceilings import cache_folder
from weft.machine.ceilings import ceilings as stored_ceilings
from weft.machine.datasheet import look_up as peaks_of

SHIPPED = Path(__file__).with_name("tables")
FORMAT = 2
BASELINES = ("torch", "eager")
MUST_BEAT = 0.99  # of the baseline's time: ours must be below it, so that noise never decides
MAY_LOSE = 1.02  # of the baseline's time: ours must stay below it in each direction and on the host
DISPATCH_US = 5.0  # host time in us allowed for Weft's own dispatch, in each direction
MARGIN = 0.05  # subtracted from MUST_BEAT for each octave between a call and its nearest point
FAR = 12.0  # octaves beyond which nothing is known, and PyTorch's own is taken
BEYOND = 0.5  # factor of the octaves by which a call has more rows than its nearest point
NEAR = 0.5  # octaves within which a choice counts as measured
SMS = 128  # of a device whose table does not say
# dtype whose points bound the time of calls without a point: of twice the bytes at most, at half the rate.
OTHER_DTYPE = {"bfloat16": "float32", "float16": "bfloat16"}
Times = Mapping[str, tuple[float, float]]  # implementation -> (cold time, host time) in us
Device = tuple[str, str | None]  # name and architecture such as sm_90, None if it is unknown

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_while_tracing(function: Function) -> Function:
    """Make ``torch.compile`` run ``function`` for real and keep its result as a constant of the graph.

    This sets the mark of ``torch.compiler.assume_constant_result``, which imports the whole compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# ---- Tables


@dataclass(frozen=True, kw_only=True)
class Point:
    """Measurements at one case: its ``sizes`` and ``flags`` as in ``keys.py``.

    ``elements`` of all inputs and the ``last`` dimension of the largest describe the case to readers.
    """

    operator: str
    case: str
    dtype: str
    elements: int
    last: int
    sizes: Sizes
    flags: Flags
    forward: Times
    backward: Times

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Point:
        def times(by_name: Mapping[str, Sequence[float]]) -> Times:
            return {name: (float(t[0]), float(t[1])) for name, t in by_name.items()}

        fields = {k: data[k] for k in ("operator", "case", "dtype", "elements", "last")}
        return Point(
            sizes=tuple(int(data["sizes"][d.name]) for d in keys.dimensions(data["operator"])),
            flags=tuple(sorted(data["flags"].items())),
            forward=times(data["forward"]),
            backward=times(data["backward"]),
            **fields,
        )

    def to_json(self) -> dict[str, Any]:
        data = {k: getattr(self, k) for k in ("operator", "case", "dtype", "elements", "last")}
        times = {k: {n: list(t) for n, t in getattr(self, k).items()} for k in (FORWARD, BACKWARD)}
        names = [d.name for d in keys.dimensions(self.operator)]
        sizes = dict(zip(names, self.sizes, strict=True))
        return data | {"sizes": sizes, "flags": dict(self.flags)} | times


def own_table(device: str) -> Path:
    """Return the path where ``weft tune`` keeps what it measured on this machine's device."""
    return cache_folder() / "dispatch" / f"{slug(device)}.json"


def read(path: Path) -> list[Point]:
    """Read a table's points. Raises :class:`WeftError` if ``weft tune`` did not write the file."""
    return list(_read_table(path)[1])


def _read_table(path: Path) -> tuple[Mapping[str, Any], list[Point]]:
    """Return the header and the points of a table; errors as in :func:`read`."""
    try:
        data = read_json(path)
        if data["format"] != FORMAT:
            raise WeftError("dispatch table", expected=f"format {FORMAT}", got=data["format"])
        return data, [Point.from_json(p) for p in data["points"]]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        hint = "remove it, or write a new one: weft tune"
        raise WeftError(f"not a dispatch table: {path}", got=repr(error), hint=hint) from error


@dataclass(frozen=True)
class Table:
    """Points of a device. ``units`` is its SM count. ``borrowed`` says in words whose table it is, if another
    device's. ``other_device`` are points of another device, for kinds of calls without a point of its own.
    ``host`` are the host's times (host_limits.py)."""

    points: tuple[Point, ...]
    units: int = SMS
    borrowed: str = ""
    other_device: tuple[Point, ...] = ()
    host: HostTimes = field(default_factory=dict, hash=False)


@cache
def table(device: Device) -> Table:
    """Return a device's shipped table, or one of its architecture, overridden by what was measured here."""
    name, architecture = device
    shipped = _shipped(name)
    nearest_device = _borrowed(name, architecture) if architecture else None
    base = shipped or nearest_device or Table(())
    by_case = {(p.operator, p.case): p for p in base.points}
    path = own_table(name)
    # The user's table comes second: a case measured on this machine replaces the shipped one.
    if path.exists() and not is_outdated(path):
        by_case |= {(p.operator, p.case): p for p in read(path)}
    others = nearest_device.points if shipped and nearest_device else ()
    return replace(base, points=tuple(by_case.values()), other_device=others)


def points(name: str, architecture: str | None = None) -> tuple[Point, ...]:
    """Return all points by which calls on the device of this name are decided."""
    return table((name, architecture)).points


def _shipped(name: str) -> Table | None:
    path = SHIPPED / f"{slug(name)}.json"
    if not path.exists():
        return None
    header, listed = _read_table(path)
    return Table(tuple(listed), int(header.get("units") or SMS), host=header.get("host") or {})


def is_outdated(path: Path) -> bool:
    """True for a user's table of an older format, which is not used: a warning says so."""
    try:
        data = read_json(path)
        version = data.get("format") if isinstance(data, dict) else None
    except ValueError:  # what is no JSON is an error of `read`
        return False
    if version not in range(1, FORMAT):
        return False
    warnings.warn(
        f"the dispatch table {path} has format {version} and is not used, since format {FORMAT} has other "
        "sizes; remove it, or measure again: weft tune",
        stacklevel=2,
    )
    return True


def _borrowed(name: str, architecture: str) -> Table | None:
    """Return the table of the nearest other device of this architecture, with scaled times."""
    own = copy_bandwidth(name)
    tables = []
    for path in sorted(SHIPPED.glob("*.json")):
        if path.stem == slug(name):
            continue
        header, listed = _read_table(path)
        if header.get("arch") == architecture:
            # Without both bandwidths the times are taken as they are.
            scale = float(header["copy"]) / own if own and header.get("copy") else 1.0
            tables.append((max(scale, 1 / scale), scale, header, listed))
    if not tables:
        return None
    _, scale, header, listed = min(tables, key=lambda t: t[0])
    scaled = tuple(_rescaled(p, scale) for p in listed)
    note = f"that of {header['device']} ({architecture}), memory-bound times multiplied by {scale:.2f}"
    return Table(scaled, int(header.get("units") or SMS), note, host=header.get("host") or {})


def copy_bandwidth(name: str) -> float | None:
    """Return a device's copy ceiling in bytes/s: as measured here, else 0.89 of its datasheet's bandwidth."""
    try:
        measured = stored_ceilings("cuda", measure=False)
    except WeftError:  # no GPU here
        measured = None
    if measured is not None and measured.device == name:
        return measured.copy
    peaks = peaks_of(name)
    # The share that a copy reaches on the first device with both figures.
    return 0.89 * peaks.bandwidth if peaks and peaks.bandwidth else None


def _rescaled(point: Point, factor: float) -> Point:
    """Return a point with the cold times of another bandwidth, if its operator is bound by memory."""
    if keys.family(point.operator) not in keys.MEMORY_BOUND:
        return point

    def times(by_name: Times) -> Times:
        return {name: (cold * factor, host) for name, (cold, host) in by_name.items()}

    return replace(point, forward=times(point.forward), backward=times(point.backward))


# ---- From times to a choice


@cache
def fallback(name: str) -> str:
    """Return PyTorch's own implementation, or ``eager`` for an operator that PyTorch does not have."""
    return next(b for b in BASELINES if b in registry.implementation_names(name))


def best(
    point: Point,
    grad: bool,
    captured: bool = False,
    must_beat: float = MUST_BEAT,
    host: Mapping[str, float] | None = None,
) -> str:
    """Return the implementation to run at a point; with ``grad``, one for both directions.

    Ours must take less than ``must_beat`` of the time of the better of eager and torch, lose in no direction,
    and, unless ``captured`` in a graph, lose no time when calls run back to back, where the host may be what
    limits them. ``host`` are implementations' host times of a whole call, which come before the point's.
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
        if host and name in host and baseline in host:
            host_time = host[name]
        elif name in BASELINES:
            host_time = sum(times[name][1] for times in directions)
        else:
            host_time = directions[0][name][1] + DISPATCH_US
            host_time += sum(max(t[name][1], t[baseline][1]) + DISPATCH_US for t in directions[1:])
        return max(cold(name), host_time)

    ours = [
        n
        for n in names
        if n not in BASELINES
        and all(t[n][0] <= MAY_LOSE * min(t[b][0] for b in baselines) for t in directions)
        and cold(n) <= must_beat * min(map(cold, baselines))
        and (captured or back_to_back(n) <= MAY_LOSE * back_to_back(baseline))
    ]
    return min(ours, key=cold, default=baseline)


@dataclass(frozen=True)
class Kind:
    """All that decides about a call beside its sizes. ``captured``: its host time does not count."""

    operator: str
    device: Device
    dtype: str
    flags: Flags
    grad: bool
    captured: bool = False


@cache
def matching(kind: Kind) -> tuple[Point, ...]:
    """Return the points that speak for calls of this kind.

    Aligned points speak for misaligned calls too, whose times the model raises. Where the device has no point
    of this kind, those of the nearest device of its architecture count.
    """
    own = table(kind.device)
    aligned = dict(kind.flags).get(keys.ALIGNED, True)

    def agrees(point: Point) -> bool:
        flags = dict(point.flags)
        if not aligned and flags.get(keys.ALIGNED):
            flags[keys.ALIGNED] = False
        return flags == dict(kind.flags)

    def of_kind(points: tuple[Point, ...]) -> tuple[Point, ...]:
        return tuple(
            p
            for p in points
            if (p.operator, p.dtype) == (kind.operator, kind.dtype)
            and (p.backward or not kind.grad)
            and agrees(p)
        )

    return of_kind(own.points) or of_kind(own.other_device)


@cache
def size_grid(kind: Kind) -> Grid:
    """Return the representative sizes of calls of this kind."""
    return keys.grid(kind.operator, [p.sizes for p in matching(kind)])


def nearest(kind: Kind, sizes: Sizes) -> tuple[list[Point], float]:
    """Return the points nearest to calls of these sizes, and how many octaves they are away.

    Several are equally near if they have the same sizes, and differ in what is not known of a call: how long
    the segments or the rows of a sparse matrix are, which values a histogram counts.
    """

    def far(point: Point, upward: float = keys.UPWARD) -> float:
        # A point of another alignment is as good as one of twice the size.
        differs = dict(point.flags).get(keys.ALIGNED) != dict(kind.flags).get(keys.ALIGNED)
        return keys.distance(kind.operator, sizes, point.sizes, upward) + differs

    distances = [(far(p), p) for p in matching(kind)]
    least = min((d for d, _ in distances), default=float("inf"))
    points = [p for d, p in distances if d <= least + 1e-9]
    return points, far(points[0], BEYOND) if points else float("inf")


@cache
def host_us(kind: Kind) -> Mapping[str, float]:
    """Return the host's time of a small call of this kind by implementation; nothing where it is unknown."""
    if kind.captured or kind.operator in keys.CHUNKED:  # chunks are launched one after another
        return {}
    return host_limits.of_calls(table(kind.device).host, kind.operator, kind.dtype, kind.grad)


@cache
def decide(kind: Kind, sizes: Sizes) -> tuple[str, str]:
    """Return the implementation for calls of these sizes, and the reason in words."""
    impl, reason = _by_device_time(kind, sizes)
    host = host_us(kind)
    if impl not in BASELINES or not host:
        return impl, reason
    # The nearest point bounds the device's time from above, however far it is: ours are charged whole waves.
    points, octaves = nearest(kind, sizes)
    factor = 1.0
    if not points and keys.family(kind.operator) in keys.MEMORY_BOUND:
        kind, factor = replace(kind, dtype=OTHER_DTYPE.get(kind.dtype, "bfloat16")), 2.0
        points, octaves = nearest(kind, sizes)
    if octaves == float("inf"):
        return impl, reason
    predicted = [_rescaled(predict(p, kind, sizes, by_waves=True), factor) for p in points]
    directions = [d for p in predicted for d in ([p.forward, p.backward] if kind.grad else [p.forward])]
    cheaper = host_limits.cheapest(host, BASELINES, directions, len(points))
    by_host = f"host time, {octaves:.1f} octaves from point {points[0].case}"
    return (cheaper, by_host) if cheaper else (impl, reason)


def _by_device_time(kind: Kind, sizes: Sizes) -> tuple[str, str]:
    """Return the choice by the nearest points' times, and the reason in words."""
    other = fallback(kind.operator)
    points, octaves = nearest(kind, sizes)
    if not points:
        return other, "no measured point of this kind"
    if octaves > FAR:
        return other, f"nothing measured within {FAR:g} octaves"
    must_beat = MUST_BEAT - MARGIN * octaves
    host = host_us(kind)
    choices = [best(predict(p, kind, sizes), kind.grad, kind.captured, must_beat, host) for p in points]
    # A kernel of ours that loses at one of several equally near points is not chosen.
    point, impl = next(
        ((p, c) for p, c in zip(points, choices, strict=True) if c in BASELINES), (points[0], choices[0])
    )
    own = table(kind.device)
    borrowed = ", of another device" if own.borrowed or point not in own.points else ""
    if octaves <= NEAR:
        return impl, f"point {point.case}{borrowed}"
    return impl, f"model, {octaves:.1f} octaves from point {point.case}{borrowed}"


def predict(point: Point, kind: Kind, sizes: Sizes, by_waves: bool = False) -> Point:
    """Return a point with its times scaled to other sizes of the same kind of call.

    The baselines' times follow the work alone. Ours are also charged for whole waves of whole tiles, and for
    rows that are not aligned: where the model errs, it errs towards torch. ``by_waves``: less so in products.
    """
    name, units = kind.operator, table(kind.device).units
    ratio = by_library = keys.work(name, sizes) / keys.work(name, point.sizes)
    if name in keys.CHUNKED:
        ratio, by_library = keys.head_ratios(sizes, point.sizes)
    loss = max(1.0, keys.waste(name, sizes, units) / keys.waste(name, point.sizes, units))
    if by_waves and keys.family(name) == "product":
        loss = max(1.0, min(loss, keys.waves_ratio(name, sizes, point.sizes, units) / ratio))
    if name in keys.BLOCK_A_ROW:
        by_library *= loss
    if dict(point.flags).get(keys.ALIGNED) and not dict(kind.flags).get(keys.ALIGNED):
        loss *= keys.MISALIGNED
    host_ratio = keys.host_ratio(name, sizes, point.sizes)

    def times(by_name: Times) -> Times:
        return {
            impl: (keys.scaled_us(cold, by_library if impl in BASELINES else ratio * loss), host * host_ratio)
            for impl, (cold, host) in by_name.items()
        }

    if sizes == point.sizes and loss == 1.0:
        return point
    return replace(point, forward=times(point.forward), backward=times(point.backward))


@cache
def bands(kind: Kind, cells: Sizes) -> tuple[tuple[float, str], ...]:
    """Return the choices along the last size as (upper border, implementation); ``cells`` are the others."""
    result: list[tuple[float, str]] = []
    for upper, representative in size_grid(kind)[-1]:
        impl, _ = decide(kind, (*cells, representative))
        if result and result[-1][1] == impl:
            result.pop()
        result.append((upper, impl))
    return tuple(result)


# ---- From a call to a choice


@dataclass(frozen=True)
class Decision:
    """Choice for a call, and why; ``in_graph``: the one beside an eager choice, for captured calls."""

    operator: str
    impl: str
    reason: str
    in_graph: bool = False


_observers: list[Callable[[Decision], None]] = []


@contextmanager
def observed(observer: Callable[[Decision], None]) -> Iterator[None]:
    """Context that calls ``observer`` with each choice that is made, and not with those that are memoized."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


# True while the current stream is captured in a CUDA graph; one call of the driver. torch.cuda puts a dummy
# in place of the function where PyTorch has no CUDA; bool() is False.
is_capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing if torch.version.cuda else bool


def choose(name: str, inputs: Sequence[Any], params: Mapping[str, Any]) -> str:
    """Return the name of the implementation for this call.

    ``inputs`` are validated tensors, None for one that was left out. In a graph that is captured the host's
    time does not count. Under ``torch.compile``, which counts as a graph, the choice is made while tracing: a
    symbolic size is only compared with the table's borders, so that a size beyond a border traces again.
    """
    tensors = [x for x in inputs if x is not None]
    if torch.compiler.is_compiling():
        return _choose_traced(name, [x for x in tensors if isinstance(x, torch.Tensor)], params)
    return _observed_choice(name, tensors, params, in_graph=False)


def choose_in_graph(name: str, inputs: Sequence[Any], params: Mapping[str, Any], eager: str) -> str:
    """Return the implementation for calls like this eager one that are captured in a graph.

    ``eager`` is the choice for the call itself; PyTorch's own is kept. Eager calls warm up before a capture,
    so that this choice is made before it is needed.
    """
    tensors = [x for x in inputs if x is not None]
    if eager in BASELINES or tensors[0].device.type != "cuda":
        return eager
    return _observed_choice(name, tensors, params, in_graph=True)


def _observed_choice(
    name: str, tensors: Sequence[torch.Tensor], params: Mapping[str, Any], in_graph: bool
) -> str:
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    impl, reason = _choose_supported(name, tensors, params, grad, in_graph or is_capturing())
    for observer in _observers:
        observer(Decision(name, impl, reason, in_graph))
    return impl


def choose_by_size(name: str, device: torch.device, dtype: torch.dtype, elements: int, last: int) -> str:
    """Return the choice for a forward-only call of an elementwise operator on ``last`` elements.

    ``elements``, those of all inputs, do not decide.
    """
    if device.type != "cuda":
        return fallback(name)
    kind = Kind(name, device_key(device.index), keys.dtype_name(dtype), (), False, is_capturing())
    return decide(kind, (keys.band_value(last, size_grid(kind)[0]),))[0]


def _choose_supported(
    name: str, tensors: Sequence[torch.Tensor], params: Mapping[str, Any], grad: bool, captured: bool
) -> tuple[str, str]:
    """Return the table's choice if it supports the call, else PyTorch's own, else eager; and the reason."""
    # In this order: the table's choice, torch's own, and eager, which supports every call.
    candidates = [fallback(name), "eager"]
    reason = "PyTorch's own on a CPU"
    device = tensors[0].device
    if device.type == "cuda":
        shapes, dtype = [x.shape for x in tensors], keys.dtype_of(tensors)
        flags = keys.flags_of(name, shapes, dtype.itemsize, params)
        kind = Kind(name, device_key(device.index), keys.dtype_name(dtype), flags, grad, captured)
        pairs = zip(keys.sizes_of(name, shapes), size_grid(kind), strict=True)
        impl, reason = decide(kind, tuple(keys.band_value(size, borders) for size, borders in pairs))
        candidates.insert(0, impl)
    case = keys.call_case(name, tensors, params)
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


def _choose_traced(name: str, tensors: Sequence[torch.Tensor], params: Mapping[str, Any]) -> str:
    device = tensors[0].device
    if device.type != "cuda":
        return _traced_fallback(name)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    dtype = keys.dtype_of(tensors)
    shapes = [x.shape for x in tensors]
    flags = keys.flags_of(name, shapes, dtype.itemsize, params)
    return _look_up_traced(name, device.index, dtype, flags, grad, keys.sizes_of(name, shapes))


def _look_up_traced(
    name: str, index: int | None, dtype: torch.dtype, flags: Flags, grad: bool, sizes: Sizes
) -> str:
    borders = _traced_grid(name, index, dtype, flags, grad)
    cells: tuple[int, ...] = ()
    for i in range(len(sizes) - 1):
        cells = (*cells, keys.band_value(sizes[i], borders[i]))
    return keys.band_value(sizes[-1], _traced_bands(name, index, dtype, flags, grad, cells))


@constant_while_tracing
def _traced_grid(name: str, index: int | None, dtype: torch.dtype, flags: Flags, grad: bool) -> Grid:
    return size_grid(Kind(name, device_key(index), keys.dtype_name(dtype), flags, grad, True))


@constant_while_tracing
def _traced_bands(
    name: str, index: int | None, dtype: torch.dtype, flags: Flags, grad: bool, cells: Sizes
) -> tuple[tuple[float, str], ...]:
    return bands(Kind(name, device_key(index), keys.dtype_name(dtype), flags, grad, True), cells)


@constant_while_tracing
def _traced_fallback(name: str) -> str:
    return fallback(name)


def device_key(index: int | None) -> Device:
    """Return name and architecture of a GPU, the current one for None."""
    number = torch.cuda.current_device() if index is None else index
    return device_name(number), architecture(number)


def clear_caches() -> None:
    """Drop the tables that were read and the bands that were made of them."""
    for cached in (table, matching, size_grid, host_us, decide, bands):
        cached.cache_clear()
