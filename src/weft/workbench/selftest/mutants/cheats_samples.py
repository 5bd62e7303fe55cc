"""Cheats with the samples of a timing: lazy outputs, wrong outputs, and work in hooks after the clock.

Each is honest in its check. Once it is timed, an output is computed when it is looked at, or is wrong until
its inputs change, or is written by a hook that runs when the clock has stopped or when inputs are written.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import (
    TIMED,
    Forward,
    blank,
    honest,
    is_timed,
    plant,
    timed_calls,
)
from weft.workbench.timing.plan import COLD

LARGE = 1 << 14  # elements: timed cases have more
SETTLED = 2  # calls on the same contents: fewer are made where no sample is taken
AT_ONCE = 2e-4  # seconds between two calls of one sample, at most
MAX_PENDING = 300  # unwritten outputs: more than a sample has
OBJECTS_UNTIL_LOOKED_AT = 8  # that Weft creates between the end of a call and the look at its output
LOOKING = ("run",)  # functions of the clock that return once it has stopped
ON_GPU = {"devices": ("cpu",), "not_here": "a GPU's samples replay a graph, and call nothing"}

Compute = Callable[[], torch.Tensor]


# -- outputs that are no plain tensors -------------------------------------------------------------


class LazyTensor(torch.Tensor):
    """Tensor that computes its contents at the first access."""

    work: Compute
    contents: torch.Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*(a.computed() if isinstance(a, cls) else a for a in args), **(kwargs or {}))

    def computed(self) -> torch.Tensor:
        self.contents = self.work() if self.contents is None else self.contents
        return self.contents


class LazyTuple(tuple[torch.Tensor, ...]):
    """Tuple of one tensor that writes it when its items are first read."""

    work: Compute | None

    def __iter__(self) -> Iterator[torch.Tensor]:
        (output,) = tuple.__iter__(self)
        if self.work is not None:
            output.copy_(self.work())
            self.work = None
        yield output


def _lazy_tensor(work: Compute, operator: str, x: tuple[torch.Tensor, ...]) -> Any:
    output = blank(operator, *x).as_subclass(LazyTensor)
    output.work = work
    return output


def _lazy_tuple(work: Compute, operator: str, x: tuple[torch.Tensor, ...]) -> Any:
    output = LazyTuple((blank(operator, *x),))
    output.work = work
    return output


def _lazy_copy(work: Compute, operator: str, x: tuple[torch.Tensor, ...]) -> Any:
    return torch._lazy_clone(work())  # type: ignore[attr-defined]


def _other_strides(work: Compute, operator: str, x: tuple[torch.Tensor, ...]) -> Any:
    return work().t().contiguous().t()


def _late(operator: str, output_of: Callable[..., Any]) -> Callable[[], Forward]:
    """Return other objects than tensors once the candidate is timed."""

    def make() -> Forward:
        counts: dict[Hashable, Iterator[int]] = {}

        def forward(*x: torch.Tensor, **params: Any) -> Any:
            def work() -> torch.Tensor:
                return honest(operator)(*x, **params)  # type: ignore[no-any-return]

            return work() if timed_calls(x, counts) < TIMED else output_of(work, operator, x)

        return forward

    return make


# -- wrong outputs while the inputs stay the same --------------------------------------------------


class Samples:
    """Tell the calls of samples from all others: a timed tensor has no guard bands and keeps its contents.

    The check puts its inputs between guards, and audits and re-checks write other contents into timed ones.
    """

    def __init__(self) -> None:
        # By id, with the tensor itself, so that no other one gets its id: its last contents and their calls.
        self.seen: dict[int, tuple[torch.Tensor | None, float, Iterator[int]]] = {}

    def has(self, x: tuple[torch.Tensor, ...]) -> bool:
        """Return True for a timed tensor that has come several times in a row with the same contents."""
        if not is_timed(x[0]) or x[0].numel() < LARGE:
            return False
        total = float(x[0].double().sum())
        _, contents, calls = self.seen.get(id(x[0]), (None, 0.0, itertools.count()))
        if contents != total:
            calls = itertools.count()
            self.seen[id(x[0])] = (x[0], total, calls)
        return next(calls) >= SETTLED


def _wrong_in_samples(
    operator: str, change: Callable[[torch.Tensor], Any], cold: bool = False
) -> Callable[[], Forward]:
    """Change the answer while inputs stay the same; with ``cold``, in runs of a sample's mode alone."""

    def make() -> Forward:
        samples = Samples()

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            y = honest(operator)(*x, **params)
            is_due = samples.has(x) and (not cold or _mode_of_run() == COLD)
            return change(y) if is_due else y  # type: ignore[no-any-return]

        return forward

    return make


def _mode_of_run() -> str:
    """Return the mode of the run that makes this call, from the variables of its function."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not (frame.f_code.co_name == "run" and "mode" in frame.f_locals):
        frame = frame.f_back
    return str(frame.f_locals.get("mode"))


def _every_other(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    turn = itertools.count()
    return lambda y: change(y) if next(turn) % 2 else y


def _wrong_at_once(operator: str) -> Callable[[], Forward]:
    """Return zeros for a call that follows another one at once, as those of a sample do."""

    def make() -> Forward:
        ended = [0.0]

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            follows = time.perf_counter() - ended[0] < AT_ONCE
            y = blank(operator, *x).zero_() if follows else honest(operator)(*x, **params)
            ended[0] = time.perf_counter()
            return y  # type: ignore[no-any-return]

        return forward

    return make


# -- hooks -----------------------------------------------------------------------------------------


class Pending:
    """Outputs that were returned unwritten, with the work that writes them."""

    def __init__(self, operator: str) -> None:
        self.operator = operator
        self.counts: dict[Hashable, Iterator[int]] = {}
        self.waiting: deque[tuple[torch.Tensor, Compute]] = deque(maxlen=MAX_PENDING)
        self.busy = False

    def defer(self, work: Compute, x: tuple[torch.Tensor, ...]) -> torch.Tensor:
        output = blank(self.operator, *x)
        self.waiting.append((output, work))
        return output

    def write(self) -> None:
        """Write all outputs that wait."""
        # Computing an answer runs the hooks again.
        if self.busy:
            return
        self.busy = True
        while self.waiting:
            output, work = self.waiting.popleft()
            output.copy_(work())
        self.busy = False


def _by_hook(operator: str, install: Callable[[Pending], None]) -> Callable[[], Forward]:
    """Return unwritten outputs once the candidate is timed; ``install`` places what writes them."""

    def make() -> Forward:
        pending, installed = Pending(operator), [False]

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            def work() -> torch.Tensor:
                return honest(operator)(*x, **params)  # type: ignore[no-any-return]

            if pending.busy or timed_calls(x, pending.counts) < TIMED:
                return work()
            if not installed[0] or operator == "softmax":  # its profile function and its garbage are used up
                installed[0] = True
                install(pending)
            pending.busy = True
            output = pending.defer(work, x)
            pending.busy = False
            return output

        return forward

    return make


def _profile(pending: Pending) -> None:
    """Write when a function of the clock returns whose outputs are looked at."""

    def hook(frame: types.FrameType, event: str, argument: object) -> None:
        if event == "return" and frame.f_code.co_name in LOOKING:
            sys.setprofile(None)
            pending.write()

    sys.setprofile(hook)


class _Garbage:
    """Cycle of objects that writes when the garbage collector finds it."""

    def __init__(self, pending: Pending) -> None:
        self.cycle, self.pending = self, pending

    def __del__(self) -> None:
        self.pending.write()


def _garbage(pending: Pending) -> None:
    """Leave a cycle, and let the collector run a few objects later: once the clock has stopped."""
    _Garbage(pending)
    gc.set_threshold(gc.get_count()[0] + OBJECTS_UNTIL_LOOKED_AT)


class _WritingMode(TorchDispatchMode):
    """Mode that writes before any operator runs."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self.pending = pending

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.pending.write()
        return func(*args, **(kwargs or {}))


def _mode(pending: Pending) -> None:
    _WritingMode(pending).__enter__()


def _audit(pending: Pending) -> None:
    """Write at any event that Python reports to audit hooks, such as the message that ends a step."""

    def hook(event: str, arguments: object) -> None:
        pending.write()

    sys.addaudithook(hook)


def _patched_methods(pending: Pending) -> None:
    """Hide methods of a tensor that are needed to look at it."""

    def writing(real: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: torch.Tensor, *rest: Any, **more: Any) -> Any:
            pending.write()
            return real(self, *rest, **more)

        return method

    for name in ("detach", "untyped_storage", "view"):
        setattr(torch.Tensor, name, writing(getattr(torch.Tensor, name)))


def _swapped_code(pending: Pending) -> None:
    """Give the functions that look at outputs other code; they stay the same objects."""
    from weft.workbench.calls import buffers
    from weft.workbench.sandbox import worker_timing
    from weft.workbench.timing import local_candidate

    for function in (local_candidate._digests, worker_timing._pick, buffers.poison, buffers.shares_memory):
        # A copy with the code that the function has now, which is replaced below.
        real = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__
        )
        name = f"_written_{function.__name__}"
        # The new code finds names only in the function's own globals.
        function.__globals__[name] = partial(_after_writing, pending, real)
        source = f"lambda *rest: {name}(*rest)"
        function.__code__ = eval(source).__code__


# -- work while inputs are written -----------------------------------------------------------------


class Prepared:
    """Answers for the contents of buffers, computed when the contents were written."""

    def __init__(self, operator: str) -> None:
        self.operator = operator
        self.counts: dict[Hashable, Iterator[int]] = {}
        self.answers: dict[int, torch.Tensor] = {}  # by the input's address
        self.params: dict[str, Any] = {}
        self.busy = self.installed = False

    def written(self, target: object) -> None:
        """Compute the answer for an input that was written, if it is one of a timed call."""
        if self.busy or type(target) is not torch.Tensor or target.numel() < LARGE:
            return
        self.busy = True
        self.answers[target.data_ptr()] = honest(self.operator)(target, **self.params)
        self.busy = False


def _while_written(operator: str, install: Callable[[Prepared], None]) -> Callable[[], Forward]:
    """Return an answer that was computed while the input was written; ``install`` places what does it."""

    def make() -> Forward:
        prepared = Prepared(operator)

        def forward(x: torch.Tensor, **params: Any) -> torch.Tensor:
            prepared.busy, prepared.params = True, params
            late = timed_calls((x,), prepared.counts) >= TIMED and x.numel() >= LARGE
            if late and not prepared.installed:
                prepared.installed = True
                install(prepared)
            answer = prepared.answers.get(x.data_ptr())
            answer = answer.clone() if answer is not None else honest(operator)(x, **params)
            prepared.busy = False
            return answer

        return forward

    return make


class _ReadingMode(TorchDispatchMode):
    """Mode that sees each copy."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__()
        self.prepared = prepared

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.prepared.written(args[0])
        return result


def _mode_at_copies(prepared: Prepared) -> None:
    _ReadingMode(prepared).__enter__()


def _patched_copies(prepared: Prepared) -> None:
    real = torch.Tensor.copy_

    def copy(self: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        real(self, *rest, **more)
        prepared.written(self)
        return self

    torch.Tensor.copy_ = copy  # type: ignore[method-assign, assignment]


def _code_of_writing(prepared: Prepared) -> None:
    from weft.workbench.calls import buffers

    function = buffers.overwrite
    real = types.FunctionType(function.__code__, function.__globals__)

    def then_prepared(target: torch.Tensor, source: torch.Tensor) -> None:
        real(target, source)
        prepared.written(target)

    function.__globals__["_prepared"] = then_prepared
    function.__code__ = (lambda target, source: _prepared(target, source)).__code__  # type: ignore[name-defined]  # noqa: F821


def _after_writing(pending: Pending, real: Callable[..., Any], *rest: Any) -> Any:
    pending.write()
    return real(*rest)


def _cheats() -> Iterator[Mutant]:
    def one(identity: str, title: str, check: str, forward: Callable[[], Forward]) -> Mutant:
        only = "" if " " in check else check
        return plant(identity, title, check, forward, phase="bench", only=only, **ON_GPU)  # type: ignore[arg-type]

    yield one("C07/softmax/eager/late-lazy", "a tensor that computes when it is looked at, once it is timed",
              "outputs", _late("softmax", _lazy_tensor))  # fmt: skip
    yield one("C07/gelu/eager/late-tuple", "a tuple that computes when it is read, once it is timed",
              "outputs", _late("gelu", _lazy_tuple))  # fmt: skip
    yield one("C07/sum/eager/late-copy", "a copy that is made when it is read, once it is timed",
              "outputs", _late("sum", _lazy_copy))  # fmt: skip
    yield one("C07/matmul/eager/late-strides", "other strides once it is timed",
              "outputs", _late("matmul", _other_strides))  # fmt: skip
    yield one("C20/softmax/eager/zeros", "zeros while its inputs stay the same",
              "sampled rows", _wrong_in_samples("softmax", torch.zeros_like))  # fmt: skip
    yield one("C20/gelu/eager/short", "an answer in bf16 in cold runs on inputs that stay the same",
              "sampled", _wrong_in_samples("gelu", _in_bf16, cold=True))  # fmt: skip
    yield one("C20/sum/eager/every-other", "every other answer doubled while its inputs stay the same",
              "sampled rows", _wrong_in_samples("sum", _every_other(lambda y: 2 * y)))  # fmt: skip
    yield one("C20/matmul/eager/half", "half of the rows while its inputs stay the same",
              "sampled rows", _wrong_in_samples("matmul", _half_of_the_rows))  # fmt: skip
    yield one("C20/gelu/eager/at-once", "zeros in a call that follows another at once",
              "recheck sampled rows", _wrong_at_once("gelu"))  # fmt: skip
    yield one("C21/softmax/eager/profile", "a profile function that computes after the clock",
              "hooks clocks rows", _by_hook("softmax", _profile))  # fmt: skip
    yield one("C21/softmax/eager/garbage", "a finalizer of garbage that computes after the clock",
              "sampled fresh recheck", _by_hook("softmax", _garbage))  # fmt: skip
    yield one("C21/sum/eager/mode", "a torch mode that computes after the clock",
              "hooks rows", _by_hook("sum", _mode))  # fmt: skip
    yield one("C21/sum/eager/audit", "an audit hook that computes after the clock",
              "hooks wall rows", _by_hook("sum", _audit))  # fmt: skip
    yield one("C21/gelu/eager/methods", "patched methods of a tensor that compute after the clock",
              "hooks wall", _by_hook("gelu", _patched_methods))  # fmt: skip
    yield one("C21/sum/eager/code", "replaces code of the clock, to compute after it",
              "hooks rows", _by_hook("sum", _swapped_code))  # fmt: skip

    # The check puts its inputs elsewhere, so that it would see nothing of these.
    yield one("C22/softmax/eager/mode", "a torch mode that computes while inputs are written",
              "hooks", _while_written("softmax", _mode_at_copies))  # fmt: skip
    yield one("C22/gelu/eager/copies", "a patched copy_ that computes while inputs are written",
              "replaced hooks", _while_written("gelu", _patched_copies))  # fmt: skip
    yield one("C22/sum/eager/code", "replaces code that writes inputs, to compute then",
              "hooks", _while_written("sum", _code_of_writing))  # fmt: skip


def _in_bf16(y: torch.Tensor) -> torch.Tensor:
    return y.bfloat16().to(y.dtype)


def _half_of_the_rows(y: torch.Tensor) -> torch.Tensor:
    y[y.shape[0] // 2 :] = 0
    return y


MUTANTS = tuple(_cheats())
