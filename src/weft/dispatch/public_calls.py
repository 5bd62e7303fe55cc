"""Public calls that come again: each is one function of its tensors, which is looked up before anything else.

A public function checks its arguments, makes placeholders and dictionaries of parameters, and asks for a plan
(operator.py). A call like an earlier one needs none of that. :func:`repeated` decorates the public function:
tensors are compared with those of recent calls with the same options, and a call like one of them runs the
function that was made for it. That is PyTorch's own function where dispatch chose it, with its own gradient,
or else the generated function that repeats the launches of Weft's kernels (repeated_calls.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import compiler
from torch.autograd import forward_ad

from weft.core import registry
from weft.dispatch import invariance, plan_cache
from weft.dispatch.operator import TRACED, _gradient_positions, _with_backward, can_skip_dispatcher
from weft.dispatch.plan_cache import RECORDED_CALL, Entry, find_recent, shapes_of
from weft.dispatch.repeated_calls import Function, Implemented, is_unfit_to_record, repeated_call_of

# Names of the fast path are bound once: each attribute in a chain is another look-up in each call.
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_function_modes = torch._C._len_torch_function_stack
_is_profiling = torch._C._autograd._profiler_enabled

Public = TypeVar("Public", bound=Callable[..., Any])
PLAIN_OPTIONS = (bool, int, float, str, type(None))  # types of options that a call is remembered with


class Repeat(NamedTuple):
    """``function(*tensors)`` does what a public call does; it may return None for tensors that it refuses.

    ``by_torch``: it calls PyTorch alone, so that modes and profilers see what they would see without it.
    """

    function: Function
    by_torch: bool

    def first_result(self) -> Repeat:
        """Return the same for a public function that returns the operator's first result alone."""
        function = self.function
        return Repeat(lambda *tensors: function(*tensors)[0], self.by_torch)


def repeated(make: Callable[..., Repeat | None]) -> Callable[[Public], Public]:
    """Return a decorator for a public function ``public(*tensors, **options)``.

    ``make(*tensors, **options)`` returns what repeats a call that succeeded, or None if there is nothing yet.
    It is asked at the fourth call of a kind, when the kernels of an operator's call have been recorded, and
    then at the eighth, sixteenth and so on.
    """

    def decorate(public: Public) -> Public:
        table = plan_cache.new_table()

        @wraps(public)
        def call(*tensors: Any, **options: Any) -> Any:
            # Half a microsecond in all: reading one property of a tensor takes a tenth of one.
            if _is_dynamo_compiling() or invariance.anywhere:  # a trace sees True in the first place
                return public(*tensors, **options)
            entry: Entry | None = None
            key: Any = None
            if tensors and tensors[-1] is None:  # as if it were left out
                tensors = tensors[:-1]
            try:
                for x in tensors:
                    if x is not None and x.is_nested:  # a comparison with it would end the process
                        raise TypeError
                # With the count: a comparison raises TypeError for another one.
                if not options:
                    key = len(tensors)
                elif len(options) == 1:  # the usual case, for half the time of the other one
                    ((name, value),) = options.items()
                    key = (len(tensors), name, value, type(value))
                else:  # True is 1, and 1.0 too: types tell them apart
                    key = (len(tensors), *options.items(), *map(type, options.values()))
                entries = table.get(key, ())
                if isinstance(entries, dict):
                    entries = entries.get(shapes_of(tensors), ())
                for entry in entries:
                    if entry.is_alike(*tensors) and (
                        entry.grad_mode is None or entry.grad_mode is _is_grad_enabled()
                    ):
                        break
                else:
                    entry = None
            # An option that cannot be hashed, or an argument that is neither a tensor nor None.
            except (TypeError, AttributeError, RuntimeError):
                return public(*tensors, **options)
            if entry is not None and (direct := entry.direct) is not None:
                # is_alike() knows of a dispatch mode.
                if entry.by_torch or not (
                    _function_modes()
                    or _is_profiling()
                    or forward_ad._current_level >= 0
                    or compiler._is_compiling_flag
                ):
                    result = direct(*tensors)
                    if result is not None:
                        return result
                return public(*tensors, **options)
            result = public(*tensors, **options)
            _learn(table, key, entry, make, tensors, options)
            return result

        return cast("Public", call)

    return decorate


def _learn(
    table: plan_cache.Table,
    key: Any,
    entry: Entry | None,
    make: Callable[..., Repeat | None],
    tensors: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Count a public call that succeeded, and make what repeats it when due."""
    if entry is None:
        is_plain = options.get("batch_invariant", False) is False and not options.get("seed")
        is_plain = is_plain and all(type(v) in PLAIN_OPTIONS for v in options.values())
        if is_plain and can_skip_dispatcher(tensors):
            plan_cache.store(table, key, tensors, None)
        return
    entry.calls += 1
    if entry.calls < RECORDED_CALL or entry.calls & (entry.calls + 1):
        return
    if is_unfit_to_record():
        entry.calls -= 1  # the next one
        return
    repeat = make(*tensors, **{k: v for k, v in options.items() if k != "batch_invariant"})
    if repeat is not None:
        # In this order: another thread may read them in between.
        entry.by_torch = repeat.by_torch
        entry.direct = repeat.function


def of_operator(name: str, **defaults: Any) -> Callable[..., Repeat | None]:
    """Return ``make`` of a public function whose tensors and result are those of its operator.

    ``defaults`` are those of the operator's parameters, in their order.
    """

    def make(*tensors: Any, impl: str | None = None, **params: Any) -> Repeat | None:
        return repeat_of(name, impl, tensors, defaults | params)

    return make


def repeat_of(
    name: str, impl: str | None, inputs: tuple[Any, ...], params: dict[str, Any], count: int | None = None
) -> Repeat | None:
    """Return what repeats an operator's call as a function of its first ``count`` inputs (None: all).

    The other inputs are placeholders, which take no gradient. The call was made before. An implementation
    whose ``forward.like(inputs, params)`` returns a function offers a shorter one for inputs like these.
    """
    known = find_recent(name, impl, inputs, params)
    if known is None:
        return None
    chosen, params = known.value.impl, dict(params)
    rest = () if count is None else inputs[count:]
    implementation = registry.implementation(name, chosen)
    forward: Any = implementation.forward
    if implementation.backend in TRACED:
        # Autocast changes what PyTorch's functions return, which only the whole implementation knows.
        like = None if torch._C._is_any_autocast_enabled() else getattr(forward, "like", None)
        short = like(inputs, params) if like else None
        if short is None:
            bound = partial(forward, **params) if params else forward
            short = (lambda *tensors: bound(*tensors, *rest)) if rest else bound
        return Repeat(short, by_torch=True)
    if not rest:
        return None if known.direct is None else Repeat(known.direct, by_torch=False)
    if known.value.repeat is None or known.direct is None:
        return None
    kernels = Implemented.of(
        name,
        chosen,
        params,
        _with_backward[name],
        _gradient_positions(name, _with_backward[name]),
        can_skip_dispatcher,
    )
    function = repeated_call_of(kernels.with_constants(rest), inputs[:count])
    return None if function is None else Repeat(function, by_torch=False)
