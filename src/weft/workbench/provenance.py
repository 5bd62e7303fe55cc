"""Provenance: which kernels really ran, seen by a profiler, and seen again without one.

A candidate's backend is its own word. What the device ran is a fact: kernels have names, and a
library's are known. All of this is a pass of its own, after the timing, and slows nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.workbench.kernel_names import INTERPRETED, is_library, origin, plain

PROFILER, GRAPH, DISPATCHER = "torch.profiler", "cuda graph", "torch dispatcher"
NOT_LOOKED = "not looked at: "
HALF = 0.5
OWN = ("triton", "cuda", "numba")  # backends that promise a kernel of the candidate's own

# What any candidate asks of PyTorch around its kernel: memory, views, copies and fills.
_WORDS = """
    alias arange as_strided as_strided_ broadcast_tensors broadcast_to chunk clone contiguous copy
    copy_ data detach detach_ diagonal empty empty_like empty_permuted empty_strided expand
    expand_as fill fill_ flatten full full_like is_contiguous is_nonzero item lift_fresh
    _local_scalar_dense movedim narrow new_empty new_empty_strided new_full new_ones new_zeros
    numpy_T ones ones_like permute record_stream requires_grad_ _reshape_alias _reshape_copy reshape
    reshape_as resize_ resize_as_ resolve_conj resolve_neg select set_ set_data size slice split
    squeeze squeeze_ stride swapaxes swapdims t t_ to _to_copy transpose transpose_ type_as
    unbind unflatten unsqueeze unsqueeze_ _unsafe_view view view_as zero_ zeros zeros_like
"""
_PYTORCH = ("aten::", "mkldnn::", "onednn::", "mkl::", "prims::", "quantized::", "sparse::")
BOOKKEEPING = frozenset(f"aten::{word}" for word in _WORDS.split())


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What ran in a call, the longest first: short names, and each one's share of the time.

    On a GPU these are the device's kernels, copies and fills; on a CPU PyTorch's operators at the
    top level, and each launch of an interpreted kernel (``triton:name``, ``numba:name``).
    ``origins`` says whose each is (see ``kernel_names``). ``seen`` is what ran at any depth, where
    ``names`` is only the top. ``source`` is the instrument; ``note`` says what it could not see.
    """

    names: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    source: str = PROFILER
    origins: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    seen: frozenset[str] = frozenset()
    note: str = ""


def kernels(call: Callable[[], object], device: str) -> Kernels:
    """What one call runs, by ``torch.profiler``, after a call of it that is not looked at.

    What the call raises, this raises. Where the profiler sees nothing at all, ``note`` says so.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to stderr of itself
    call()
    if torch.device(device).type == "cuda":
        return _on_device(call)
    failed: list[str] = []

    @contextmanager
    def launch(name: str) -> Iterator[None]:
        with torch.profiler.record_function(name):
            try:
                yield
            except BaseException:
                failed.append(name)
                raise

    with _launches(launch):
        events = _profiled(call, torch.profiler.ProfilerActivity.CPU)
    return _on_host(events, failed)


def _on_host(events: list[Any], failed: list[str]) -> Kernels:
    """The operators and launches of a profile, less the launches that raised."""
    # An operator of the candidate's own is a cover: what counts is what was done beneath it.
    covers = {id(cover) for e in events if _known(e.name) for cover in _above(e)}
    tops: dict[str, list[float]] = {}
    seen: set[str] = set()
    for event in events:
        if not _counts(event.name):
            continue
        above = [one.name for one in _above(event) if _known(one.name)]
        if not any(name.startswith(_LAUNCHED) for name in above):
            seen.add(event.name)
        if not above and (_known(event.name) or id(event) not in covers):
            tops.setdefault(event.name, []).append(event.time_range.elapsed_us())
    for name in {n for n in failed if failed.count(n) >= len(tops.get(n, ()))}:
        tops.pop(name, None)
        seen.discard(name)
    if not tops:
        return Kernels(note=NOT_LOOKED + "nothing that has a name ran; compiled code has none here")
    return _kernels(tops, {name: _origin_of(name) for name in tops}, PROFILER, frozenset(seen))


def observed(call: Callable[[], object], device: str) -> Kernels:
    """What one call runs, by no profiler: from a CUDA graph's nodes, or the dispatcher's own list.

    There are no times: a share is of the calls. ``note`` says why where it could not be looked at.
    The last pass of a process: a capture that fails can leave PyTorch's generator of random
    numbers unusable.
    """
    if torch.device(device).type == "cuda":
        return _captured(call)
    call()
    ops: dict[str, list[float]] = {}
    collector = _Collector(ops)
    with _launches(collector.launch), collector:
        call()
    return _kernels(ops, {n: _origin_of(n) for n in ops}, DISPATCHER, frozenset(ops))


def compare(with_profiler: Kernels, without: Kernels) -> str:
    """What differs between the two lists, '' where nothing does.

    A candidate that looks for a profiler, and takes the honest path when it sees one, differs.
    ``not looked at: ...`` is neither: one of the two could not be made.
    """
    for one in (with_profiler, without):
        if one.note:
            return one.note
    if without.source == DISPATCHER:
        # Either may be done in place or not: autograd adds up differently under a dispatch mode.
        ran = {n.rstrip("_") for n in with_profiler.seen}
        more = {n for n in with_profiler.seen if n.startswith(_LAUNCHED)} - without.seen
        fewer = {n for n in without.seen if n not in BOOKKEEPING and n.rstrip("_") not in ran}
    else:
        under, again = _working(with_profiler), _working(without)
        more, fewer = under - again, again - under
    told = []
    if more:
        told.append(f"only under a profiler: {', '.join(sorted(more))}")
    if fewer:
        told.append(f"only without one: {', '.join(sorted(fewer))}")
    return "; ".join(told)


def verdict(backend: str, kernels: Kernels, around: str = "") -> str:
    """Why this is no candidate of that backend, '' where it is: whose kernels take the time.

    Copies and fills are nobody's; nor are those of the library that it is declared to be built
    ``around``, if there are others beside them. On a CPU an operator of PyTorch's tells only where
    no interpreted kernel ran, since an interpreter's time says nothing of the work it does.
    """
    if backend not in OWN or not kernels.names:
        return ""
    rows = list(zip(kernels.names, kernels.shares, kernels.origins, strict=True))
    work = [row for row in rows if row[2] != "memory"]
    work = [row for row in work if row[2] != around] or work
    foreign = [row for row in work if is_library(row[2], row[0], backend)]
    on_cpu = any(name.startswith(_PYTORCH) for name, _, _ in rows)
    if on_cpu and len(foreign) < len(work):
        others = [n for n, _, o in foreign if o in INTERPRETED]
        return f"declared {backend}, but it ran {', '.join(others)}" if others else ""
    total = sum(share for _, share, _ in work)
    share = sum(share for _, share, _ in foreign) / total if total else 0.0
    if not foreign or share <= HALF:
        return ""
    named = ", ".join(f"{name} ({found})" for name, _, found in foreign[:3])
    unit = "the time of its PyTorch operators" if on_cpu else "its device time"
    none = "" if len(foreign) < len(work) else ", and no kernel of its own ran"
    return f"declared {backend}, but {share:.0%} of {unit} is a library's: {named}{none}"


def _working(found: Kernels) -> set[str]:
    both = zip(found.names, found.origins, strict=True)
    return {name for name, whose in both if whose != "memory"}


def _counts(name: str) -> bool:
    """Whether an event is an operator or a launch; autograd's own frames are neither."""
    operator = "::" in name and not name.startswith("autograd::")
    return operator or name.startswith(_LAUNCHED)


def _known(name: str) -> bool:
    """Whether an event is an operator of PyTorch's or a launch, and no operator of one's own."""
    return name.startswith((*_PYTORCH, *_LAUNCHED))


def _above(event: Any) -> list[Any]:
    """The operators and launches within which an event took place."""
    found, parent = [], event.cpu_parent
    while parent is not None:
        if _counts(parent.name):
            found.append(parent)
        parent = parent.cpu_parent
    return found


def _origin_of(name: str) -> str:
    """Whose an operator or a launch on a CPU is."""
    if name in BOOKKEEPING:
        return "memory"
    return "aten" if name.startswith(_PYTORCH) else origin(name)


def _kernels(
    times: dict[str, list[float]], origins: dict[str, str], source: str, seen: frozenset[str]
) -> Kernels:
    total = sum(map(sum, times.values())) or 1.0
    names = sorted(times, key=lambda n: (-sum(times[n]), n))
    return Kernels(
        names=tuple(names),
        shares=tuple(sum(times[n]) / total for n in names),
        source=source,
        origins=tuple(origins[n] for n in names),
        counts=tuple(len(times[n]) for n in names),
        seen=seen,
    )


def _profiled(call: Callable[[], object], activity: Any) -> list[Any]:
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=[activity], experimental_config=everywhere) as profiler:
        call()
        if activity == torch.profiler.ProfilerActivity.CUDA:
            torch.cuda.synchronize()
    return list(profiler.events() or ())


def _on_device(call: Callable[[], object]) -> Kernels:
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    origins: dict[str, str] = {}
    for event in _profiled(call, torch.profiler.ProfilerActivity.CUDA):
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if not on_gpu or getattr(event, "is_user_annotation", False):
            continue
        name = plain(event.name)
        origins[name] = origin(event.name)
        times.setdefault(name, []).append(event.time_range.elapsed_us())
    if not times:
        return Kernels(note=NOT_LOOKED + "the profiler saw no kernel on the device")
    return _kernels(times, origins, PROFILER, frozenset(times))


def _captured(call: Callable[[], object]) -> Kernels:
    """The kernels of one call captured into a CUDA graph, which is not replayed."""
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # a capture that fails leaves its stream current
            call()  # what a first call prepares (workspaces, compiled code) cannot be captured
            side.synchronize()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                kept = call()
        torch.cuda.synchronize()
        names = list(_nodes(graph.raw_cuda_graph()))
        del kept
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:
        text = " ".join(str(error).split())[:200]
        why = f"the call cannot be captured into a CUDA graph ({type(error).__name__}: {text})"
        return Kernels(source=GRAPH, note=NOT_LOOKED + why)
    times: dict[str, list[float]] = {}
    for name in names:
        times.setdefault(plain(name), []).append(1.0)
    return _kernels(times, {plain(n): origin(n) for n in names}, GRAPH, frozenset(times))


def _nodes(graph: Any) -> Iterator[str]:
    """The mangled names of a graph's kernel nodes, child graphs included; copies as 'memcpy'."""
    from cuda.bindings import driver

    kinds = driver.CUgraphNodeType
    handle = driver.CUgraph(graph) if isinstance(graph, int) else graph
    _, count = _ok(driver.cuGraphGetNodes(handle))
    nodes, _ = _ok(driver.cuGraphGetNodes(handle, count)) if count else ((), 0)
    for node in nodes:
        kind = _ok(driver.cuGraphNodeGetType(node))
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            yield _kernel_name(_ok(driver.cuGraphKernelNodeGetParams(node)))
        elif kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
            yield from _nodes(_ok(driver.cuGraphChildGraphNodeGetGraph(node)))
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
            yield "memcpy"
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
            yield "memset"


def _kernel_name(node: Any) -> str:
    from cuda.bindings import driver

    if int(node.func):
        return str(_ok(driver.cuFuncGetName(node.func)).decode(errors="replace"))
    return str(_ok(driver.cuKernelGetName(node.kern)).decode(errors="replace"))


def _ok(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if int(status):
        raise RuntimeError(f"the driver says {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


class _Collector(TorchDispatchMode):
    """Counts the operators that are dispatched, except within a launch, which counts as one."""

    def __init__(self, ops: dict[str, list[float]]) -> None:
        super().__init__()
        self.ops, self.depth = ops, 0

    @contextmanager
    def launch(self, name: str) -> Iterator[None]:
        self.depth += 1
        try:
            yield
            self.ops.setdefault(name, []).append(1.0)  # only one that has not raised
        finally:
            self.depth -= 1

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self.depth:
            self.ops.setdefault(func._schema.name, []).append(1.0)
        return func(*args, **(kwargs or {}))


@contextmanager
def _launches(around: Callable[[str], Any]) -> Iterator[None]:
    """Enter ``around('triton:name')`` for each kernel run by an interpreter, or by numba's njit.

    Nothing is imported for it: a toolchain that was not in use after a first call launches nothing.
    """
    with ExitStack() as stack:
        for module, kind, prefix in _LAUNCHERS:
            loaded = sys.modules.get(module)
            if loaded is not None:
                stack.enter_context(_told(getattr(loaded, kind), loaded, prefix, around))
        yield


# Where a launch passes, and the prefix of its kernel's name.
_LAUNCHERS = (
    ("triton.runtime.interpreter", "GridExecutor", INTERPRETED["triton"]),
    ("numba.cuda.simulator.kernel", "FakeCUDAKernel", INTERPRETED["numba"]),
    ("numba.core.dispatcher", "Dispatcher", INTERPRETED["numba"]),
)
_LAUNCHED = tuple(INTERPRETED.values())


@contextmanager
def _told(kind: Any, module: Any, prefix: str, around: Callable[[str], Any]) -> Iterator[None]:
    """Replace the call of this class, for a while, by one that tells of itself."""
    run, own = kind.__call__, "__call__" in vars(kind)

    def told(self: Any, *arguments: Any, **more: Any) -> Any:
        # A function that a simulated kernel calls is a part of it, and no launch.
        if getattr(self, "_device", False) or getattr(module, "_kernel_context", None) is not None:
            return run(self, *arguments, **more)
        function = getattr(self, "fn", None) or self.py_func
        with around(prefix + function.__name__):
            return run(self, *arguments, **more)

    kind.__call__ = told
    try:
        yield
    finally:
        if own:
            kind.__call__ = run
        else:
            del kind.__call__
