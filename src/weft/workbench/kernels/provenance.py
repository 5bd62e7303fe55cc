"""Provenance: the kernels that really ran, listed once with a profiler and once without.

A candidate declares its backend, which proves nothing. The device's kernels have names, and the names of
libraries' kernels are known. The lists are made in a separate pass after the timing and slow nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.workbench.calls.buffers import Outputs, tensors_of, values_equal
from weft.workbench.calls.graph_capture import graph_capture
from weft.workbench.kernels.names import INTERPRETED, is_library, origin, plain

PROFILER, GRAPH, DISPATCHER = "torch.profiler", "cuda graph", "torch dispatcher"
NOT_LISTED = "not looked at: "
UNNAMED = (
    NOT_LISTED + "only copies and allocations have names here; compiled code has none, nor has a library's "
    "function that is called by its address"
)
HALF = 0.5
OWN = ("triton", "cuda", "numba")  # backends that promise a kernel of the candidate's own

# PyTorch operators that any candidate needs around its kernel: memory, views, copies and fills.
_BOOKKEEPING_NAMES = """
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
BOOKKEEPING = frozenset(f"aten::{word}" for word in _BOOKKEEPING_NAMES.split())


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels of one call, the longest first: short names, and each one's share of the time.

    On a GPU these are the device's kernels, copies and fills. On a CPU they are PyTorch's operators at the
    top level and each launch of an interpreted kernel (``triton:name``, ``numba:name``). ``origins`` says
    who wrote each (see ``names.origin``). ``seen`` holds what ran at any depth, ``names`` only the top
    level. ``source`` is the instrument; ``note`` says why it could not list anything.
    """

    names: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    source: str = PROFILER
    origins: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    seen: frozenset[str] = frozenset()
    note: str = ""


def kernels(call: Callable[[], object], device: str, *, dispatched: bool = False) -> Kernels:
    """List what one call runs, with ``torch.profiler``, after one call without it.

    With ``dispatched`` an empty dispatch mode is active on a CPU: some of PyTorch's functions, such as
    ``max_pool1d``, are made of other operators then. Exceptions of the call pass through. If the profiler
    lists nothing, ``note`` says so.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it writes to stderr by itself
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

    mode = _Collector({}) if dispatched else nullcontext()
    with _launches(launch), mode:
        events = _profiled(call, torch.profiler.ProfilerActivity.CPU)
    return _on_host(events, failed)


def _on_host(events: list[Any], failed: list[str]) -> Kernels:
    """Return the operators and launches of a profile, without the launches that raised."""
    # A candidate's own operator only wraps other work: the operators inside it count, not itself.
    wrappers = {id(outer) for e in events if _is_known(e.name) for outer in _enclosing(e)}
    tops: dict[str, list[float]] = {}
    seen: set[str] = set()
    for event in events:
        if not _is_work(event.name):
            continue
        enclosing = [outer.name for outer in _enclosing(event) if _is_known(outer.name)]
        if not any(name.startswith(_LAUNCHED) for name in enclosing):
            seen.add(event.name)
        if not enclosing and (_is_known(event.name) or id(event) not in wrappers):
            tops.setdefault(event.name, []).append(event.time_range.elapsed_us())
    for name in {n for n in failed if failed.count(n) >= len(tops.get(n, ()))}:
        tops.pop(name, None)
        seen.discard(name)
    if not tops:
        return Kernels(note=NOT_LISTED + "nothing with a name ran; compiled code has no names here")
    return _kernels(tops, {name: _origin_of(name) for name in tops}, PROFILER, frozenset(seen))


def observed(call: Callable[[], object], device: str) -> Kernels:
    """List what one call runs, without a profiler: from a CUDA graph's nodes, or by the dispatcher.

    There are no times: a share is a share of the calls. ``note`` says why if nothing could be listed. This
    must be the last pass of a process: a failed capture can leave PyTorch's random generator unusable.
    """
    if torch.device(device).type == "cuda":
        return _captured(call)
    call()
    ops: dict[str, list[float]] = {}
    collector = _Collector(ops)
    with _launches(collector.launch), collector:
        call()
    return _kernels(ops, {n: _origin_of(n) for n in ops}, DISPATCHER, frozenset(ops))


def is_same_without_kernels(call: Callable[[], Outputs]) -> bool:
    """Return True if a call on a CPU returns the same numbers where its interpreted kernels do nothing.

    Other code computes the answer then. The inputs must be new to the process: memory that was freed before
    could hold the answer to old ones, and an output that no kernel wrote would be right. False where a kernel
    is needed for the call to return, where none was launched, and for outputs without elements.
    """
    launched: list[str] = []

    def note(name: str) -> AbstractContextManager[None]:
        launched.append(name)
        return nullcontext()

    with _launches(note, run_kernels=False):
        try:
            without = tuple(t.clone() for t in tensors_of(call()))  # a copy: outputs may be inputs
        except Exception:  # noqa: BLE001 - the candidate's code may raise anything without its kernels
            return False
    try:
        equal = values_equal(without, tuple(tensors_of(call())))
    except (RuntimeError, ValueError, AttributeError):  # other shapes, another number, or no tensors
        return False
    return equal and bool(launched) and any(t.numel() for t in without)


def compare(with_profiler: Kernels, without: Kernels, dispatched: Kernels | None = None) -> str:
    """Return how the two lists differ, '' if they do not.

    They differ for a candidate that looks for a profiler and takes the honest path when it finds one.
    ``dispatched`` is the profiler's list under a dispatch mode, the instrument of the second list on a CPU:
    what PyTorch runs because of the mode is in both. ``not looked at: ...`` means that one of the two could
    not be made.
    """
    for listing in (with_profiler, without):
        if listing.note:
            return listing.note
    if without.source == DISPATCHER:
        # An operator may run in place or not: autograd accumulates differently under a dispatch mode.
        seen = with_profiler.seen | (dispatched.seen if dispatched else frozenset())
        profiled = {n.rstrip("_") for n in seen}
        more = {n for n in with_profiler.seen if n.startswith(_LAUNCHED)} - without.seen
        fewer = {n for n in without.seen if n not in BOOKKEEPING and n.rstrip("_") not in profiled}
    else:
        profiled, unprofiled = _without_copies(with_profiler), _without_copies(without)
        more, fewer = profiled - unprofiled, unprofiled - profiled
    differences = []
    if more:
        differences.append(f"only under a profiler: {', '.join(sorted(more))}")
    if fewer:
        differences.append(f"only without one: {', '.join(sorted(fewer))}")
    return "; ".join(differences)


def unnamed_work(kernels: Kernels) -> str:
    """Return a note if nothing that computes has a name in a list of a CPU, else ''."""
    return UNNAMED if set(kernels.origins) == {"memory"} else ""


def verdict(backend: str, kernels: Kernels, wraps_library: str = "") -> str:
    """Return why the call does not belong to that backend, '' if it does.

    It does not if a library's kernels take most of the time. Copies and fills do not count. Kernels of the
    library that it declares with ``wraps_library`` do not count either, if there are others beside them.
    On a CPU a PyTorch operator counts only if no interpreted kernel ran: an interpreter's time says nothing
    about the work it does.
    """
    if backend not in OWN or not kernels.names:
        return ""
    rows = list(zip(kernels.names, kernels.shares, kernels.origins, strict=True))
    work = [row for row in rows if row[2] != "memory"]
    work = [row for row in work if row[2] != wraps_library] or work
    foreign = [row for row in work if is_library(row[2], row[0], backend)]
    on_cpu = any(name.startswith(_PYTORCH) for name, _, _ in rows)
    if on_cpu and len(foreign) < len(work):
        others = [n for n, _, o in foreign if o in INTERPRETED]
        return f"declared {backend}, but it ran {', '.join(others)}" if others else ""
    total = sum(share for _, share, _ in work)
    share = sum(share for _, share, _ in foreign) / total if total else 0.0
    if not foreign or share <= HALF:
        return ""
    listed = ", ".join(f"{name} ({whose})" for name, _, whose in foreign[:3])
    unit = "the time of its PyTorch operators" if on_cpu else "its device time"
    none = "" if len(foreign) < len(work) else ", and no kernel of its own ran"
    return f"declared {backend}, but {share:.0%} of {unit} is a library's: {listed}{none}"


def _without_copies(kernels: Kernels) -> set[str]:
    rows = zip(kernels.names, kernels.origins, strict=True)
    return {name for name, whose in rows if whose != "memory"}


def _is_work(name: str) -> bool:
    """True for an operator or a launch; autograd's own frames are neither."""
    operator = "::" in name and not name.startswith("autograd::")
    return operator or name.startswith(_LAUNCHED)


def _is_known(name: str) -> bool:
    """True for a PyTorch operator or a launch, False for a candidate's own operator."""
    return name.startswith((*_PYTORCH, *_LAUNCHED))


def _enclosing(event: Any) -> list[Any]:
    """Return the operators and launches that an event ran inside of."""
    enclosing, parent = [], event.cpu_parent
    while parent is not None:
        if _is_work(parent.name):
            enclosing.append(parent)
        parent = parent.cpu_parent
    return enclosing


def _origin_of(name: str) -> str:
    """Return the origin of an operator or a launch on a CPU."""
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
        return Kernels(note=NOT_LISTED + "the profiler saw no kernel on the device")
    return _kernels(times, origins, PROFILER, frozenset(times))


def _captured(call: Callable[[], object]) -> Kernels:
    """List the kernels of one call that is captured into a CUDA graph and not replayed."""
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # a failed capture leaves its stream current; this restores it
            call()  # workspaces and compiled code of a first call cannot be captured
            side.synchronize()
            with graph_capture(graph, side, error_mode="thread_local"):
                outputs = call()  # must outlive the capture: freed memory would be reused in the graph
        torch.cuda.synchronize()
        names = list(_nodes(graph.raw_cuda_graph()))
        del outputs
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:
        text = " ".join(str(error).split())[:200]
        why = f"the call cannot be captured into a CUDA graph ({type(error).__name__}: {text})"
        return Kernels(source=GRAPH, note=NOT_LISTED + why)
    times: dict[str, list[float]] = {}
    for name in names:
        times.setdefault(plain(name), []).append(1.0)
    return _kernels(times, {plain(n): origin(n) for n in names}, GRAPH, frozenset(times))


def _nodes(graph: Any) -> Iterator[str]:
    """Yield the mangled names of a graph's kernel nodes, including child graphs; copies as 'memcpy'."""
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

    # A node has a function of a module, or a kernel of a library that was loaded without a context.
    if int(node.func):
        return str(_ok(driver.cuFuncGetName(node.func)).decode(errors="replace"))
    return str(_ok(driver.cuKernelGetName(node.kern)).decode(errors="replace"))


def _ok(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if int(status):
        raise RuntimeError(f"the driver returned {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


class _Collector(TorchDispatchMode):
    """Dispatch mode that counts operators; a launch counts once, whatever runs inside it."""

    def __init__(self, ops: dict[str, list[float]]) -> None:
        super().__init__()
        self.ops, self.depth = ops, 0

    @contextmanager
    def launch(self, name: str) -> Iterator[None]:
        self.depth += 1
        try:
            yield
            self.ops.setdefault(name, []).append(1.0)  # not reached by a launch that raised
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
def _launches(context: Callable[[str], Any], *, run_kernels: bool = True) -> Iterator[None]:
    """Enter ``context('triton:name')`` for each kernel run by an interpreter, or by numba's njit.

    Without ``run_kernels`` a launch does nothing else and returns None. Nothing is imported for it: a
    toolchain that a first call did not load launches nothing.
    """
    with ExitStack() as stack:
        for module, kind, prefix in _LAUNCHERS:
            loaded = sys.modules.get(module)
            if loaded is not None:
                kernels = getattr(loaded, kind)
                stack.enter_context(_patched(kernels, loaded, prefix, context, run_kernels))
        yield


# (module, class whose call is a launch, prefix of the kernel's name)
_LAUNCHERS = (
    ("triton.runtime.interpreter", "GridExecutor", INTERPRETED["triton"]),
    ("numba.cuda.simulator.kernel", "FakeCUDAKernel", INTERPRETED["numba"]),
    ("numba.core.dispatcher", "Dispatcher", INTERPRETED["numba"]),
)
_LAUNCHED = tuple(INTERPRETED.values())


@contextmanager
def _patched(
    kind: Any, module: Any, prefix: str, context: Callable[[str], Any], run_kernels: bool
) -> Iterator[None]:
    """Replace ``kind.__call__`` by one that enters ``context`` with the kernel's name."""
    # An inherited __call__ is restored by deleting ours, or the class would keep its base's as its own.
    run, own = kind.__call__, "__call__" in vars(kind)

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        # A device function that a simulated kernel calls is part of it and no launch.
        if getattr(self, "_device", False) or getattr(module, "_kernel_context", None) is not None:
            return run(self, *arguments, **keywords)
        function = getattr(self, "fn", None) or self.py_func
        with context(prefix + function.__name__):
            return run(self, *arguments, **keywords) if run_kernels else None

    kind.__call__ = call
    try:
        yield
    finally:
        if own:
            kind.__call__ = run
        else:
            del kind.__call__
