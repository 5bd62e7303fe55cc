"""Registration: from a registry entry to a function that PyTorch can trace and differentiate.

The way of a call ``ops.softmax(x, impl=...)``, unless one like it has a function already (public_calls.py):

1. :func:`call` looks up the plan for this kind of call (shapes, dtypes, devices, gradient wanted). The first
   call of a kind makes it: it validates the arguments, lets ``choice.py`` choose if ``impl`` is None, and
   refuses an implementation that does not support the call.
2. ``eager``, ``torch`` and ``compile`` are plain torch code. They are called as they are, so that autograd
   and ``torch.compile`` see through them.
3. Our own kernels are called directly if nothing but the kernel would act on the call (the fast path), with
   the tensors' device as the current one (``devices.py``). PyTorch's engine does so for a backward.
4. Otherwise the call goes through a ``torch.library`` operator ``weft::NAME(..., str impl)`` with a fake
   kernel and a registered ``weft::NAME_backward``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from weft.backends import support
from weft.core import Case, Input, WeftError, registry
from weft.core.implementation import without_suffix
from weft.core.operator import unknown_name
from weft.dispatch import autograd_context, choice, devices, invariance, plan_cache
from weft.dispatch.autograd_context import apply_without_checks, refuse_double_backward
from weft.dispatch.plan_cache import Entry, find_recent, look_up, memoize, recent, store_recent
from weft.dispatch.plans import TRACED, Plan, plan_by_mode
from weft.dispatch.repeated_calls import (
    BACKENDS,
    Implemented,
    is_due,
    is_observed,
    repeated_call,
    repeated_call_with_gradient,
)

DEVICES = ("cpu", "cuda")
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
Function = Callable[..., Any]
library = torch.library.Library("weft", "FRAGMENT")

# Names of the fast path are bound once: each attribute in a chain is another look-up in each call.
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state
_is_profiling = torch._C._autograd._profiler_enabled


def _accept() -> None:
    """Accept a call whose arguments were validated before."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Signature of an operator for PyTorch, and the functions that compute it.

    ``inputs`` and ``saved`` are argument lists in torch.library's schema language, without ``impl``.
    ``fake(*inputs)`` returns an output with the right shape, dtype and strides, or a tuple if there are
    several ``outputs``. ``fake_backward(grad, *saved)`` returns the gradients, one for each differentiable
    input. A gradient comes in for the first ``differentiable_outputs`` outputs. ``params`` names the scalar
    arguments, which come last in ``inputs`` and ``saved``; the fakes do not get them, except that ``fake``
    gets them by name if ``fake_gets_params``. ``gradients=0``: the operator has no gradient.

    If the gradient is only a view (a broadcast), ``view_backward(grad, *saved)`` returns it without a
    kernel, and ``saved``, ``gradients`` and ``fake_backward`` are not needed.

    An operator that the registry does not name brings its own ``forward(impl, *inputs, **params)`` and
    ``backward(impl, *grads, *saved, **params)``, which check whether ``impl`` supports the call, its
    ``save(inputs, output)`` and the names of its ``differentiable`` inputs. Inputs may be lists of tensors
    (``Tensor(a!)[] params``: overwritten) and numbers that the fakes need. ``outputs=0`` means that the
    operator overwrites its inputs and has no gradient. Outputs of one operator may not share memory:
    gradients that are views of one buffer are returned as that buffer. With ``shares_gradient`` the first
    two inputs, of a sum, have one gradient: ``backward.shared`` of an implementation returns it once, as do
    ``fake_backward`` and ``weft::NAME_backward``. With ``optional_impl`` ``forward`` chooses for a None.

    ``repeats``: what implementations launch follows from the layouts and the scalars of a call, not from the
    contents of its tensors, from the stream or from earlier calls. Calls are then recorded, and repeated by
    generated functions (repeated_calls.py).
    """

    inputs: str
    fake: Callable[..., Any]
    saved: str = ""
    gradients: int = 1
    fake_backward: Callable[..., tuple[torch.Tensor, ...]] | None = None
    view_backward: Callable[..., tuple[torch.Tensor, ...]] | None = None
    params: tuple[str, ...] = ()
    outputs: int = 1
    differentiable_outputs: int = 1
    forward: Callable[..., Any] | None = None
    backward: Callable[..., tuple[torch.Tensor, ...]] | None = None
    save: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] | None = None
    differentiable: tuple[str, ...] | None = None
    optional_impl: bool = False
    fake_gets_params: bool = False
    shares_gradient: bool = False
    repeats: bool = False

    def input_names(self) -> list[str]:
        """Return the names of the inputs in order, without ``params``."""
        # "Tensor(a!)[] params" -> "params": the last word is the name.
        names = [argument.split()[-1] for argument in self.inputs.split(",")]
        return names[: len(names) - len(self.params)]

    def saves_tensors_alone(self) -> bool:
        """True if what a backward gets besides the gradients and ``params`` are tensors, not None."""
        arguments = [argument.split() for argument in self.saved.split(",") if argument]
        return all(kind == "Tensor" or name in self.params for kind, name in arguments)


def call(
    name: str,
    inputs: tuple[Any, ...],
    params: dict[str, Any],
    impl: str | None,
    check: Callable[[], None] = _accept,
    batch_invariant: bool = False,
) -> Any:
    """Run operator ``name`` with the implementation ``impl`` (None: the one that dispatch chooses).

    ``batch_invariant`` asks for its variant whose rows do not depend on the batch (invariance.py).

    ``check`` raises for invalid arguments. It reads no tensor's contents, so that it runs once for all calls
    with tensors and parameters like these. Raises :class:`WeftError` for an unknown ``impl``, or for one
    that does not run here, with the reason.
    """
    # torch.compiler.is_compiling(), which is two Python functions. A trace sees True in the first place.
    if _is_dynamo_compiling() or torch.compiler._is_compiling_flag:
        check()
        return _call_traced(name, inputs, params, impl, batch_invariant)
    # `anywhere` is False in nearly all programs: the context variable is then not looked up.
    if batch_invariant is False and not invariance.anywhere:
        # A public function that comes again does not get here (public_calls.py).
        entry = find_recent(name, impl, inputs, params)
        if entry is not None:
            if entry.direct is None or is_observed():
                return _run_again(entry, inputs, params)
            return entry.direct(*inputs)
    return _new_plan(name, inputs, params, impl, check, batch_invariant).run(inputs, params)


def _run_again(entry: Entry, inputs: tuple[Any, ...], params: dict[str, Any]) -> Any:
    """Run a call like a recent one that has no function of its own, which it may get now."""
    known = entry.value
    if known.repeat is not None and is_due(entry):
        entry.direct = known.repeat(inputs, params)
    return known.run_plain(inputs, params)


def plan(
    name: str,
    inputs: tuple[Any, ...],
    params: dict[str, Any],
    impl: str | None,
    check: Callable[[], None] = _accept,
    batch_invariant: bool = False,
) -> Plan:
    """Return the plan of a call that is not traced. Arguments and errors are those of :func:`call`."""
    if batch_invariant is False and not invariance.anywhere:
        cached = recent(name, impl, inputs, params)
        if cached is not None:
            return cached  # type: ignore[no-any-return]
    return _new_plan(name, inputs, params, impl, check, batch_invariant)


def _new_plan(
    name: str,
    inputs: tuple[Any, ...],
    params: dict[str, Any],
    impl: str | None,
    check: Callable[[], None],
    batch_invariant: bool,
) -> Plan:
    """Return the plan of a call whose tensors are unlike those of recent calls."""
    invariant = invariance.anywhere and invariance.is_requested()
    if batch_invariant is not False:
        invariant = invariance.check_flag(name, batch_invariant) or invariant
    key, cached = look_up((name, impl, invariant), inputs, params)
    if cached is None:
        cached = _make_plan(name, inputs, params, impl, check, invariant)
        if impl is None and choice.is_capturing():  # a choice that eager calls may not take
            return cached
        memoize(key, cached)
    if key is not None and cached.run_plain and not invariant and can_skip_dispatcher(inputs):
        store_recent(name, impl, inputs, params, cached)
    return cached  # type: ignore[no-any-return]


def _make_plan(
    name: str,
    inputs: tuple[Any, ...],
    params: dict[str, Any],
    impl: str | None,
    check: Callable[[], None],
    invariant: bool,
) -> Plan:
    devices.common_device(name, inputs)  # or an error, if there are several
    check()
    if impl is not None:
        resolve(name, impl)  # raises WeftError for a name that no implementation has
    chosen = invariance.choose(name, inputs, params, impl) if invariant else impl
    chosen = impl if chosen is None else chosen
    if chosen is not None:
        return _plan_of(name, chosen, inputs, params)
    chosen = choice.choose(name, inputs, params)
    in_graph = choice.choose_in_graph(name, inputs, params, chosen)
    eager_plan = _plan_of(name, chosen, inputs, params)
    if in_graph == chosen:
        return eager_plan
    graph_plan = _plan_of(name, in_graph, inputs, params)
    return plan_by_mode(eager_plan, graph_plan, devices.index_of(inputs))


def _plan_of(name: str, impl: str, inputs: tuple[Any, ...], params: dict[str, Any]) -> Plan:
    """Return the plan that calls ``impl``. Raises :class:`WeftError` if it does not support the call."""
    if resolve(name, impl) not in TRACED:
        return _kernel_plan(name, impl, inputs, params)
    refuse_unsupported(name, impl, inputs, params)
    forward = registry.implementation(name, impl).forward

    def run(x: tuple[Any, ...], scalars: dict[str, Any]) -> Any:
        return forward(*x, **scalars)

    return Plan(impl, run, run)


def _kernel_plan(name: str, impl: str, inputs: tuple[Any, ...], params: dict[str, Any]) -> Plan:
    """Return the plan that calls one of our kernels, directly where possible."""
    operator = getattr(torch.ops.weft, name).default
    if any(x is not None and x.device.type not in DEVICES for x in inputs):  # meta tensors have no memory
        return Plan(impl, lambda x, scalars: operator(*x, *scalars.values(), impl))
    refuse_unsupported(name, impl, inputs, params)
    # Fixed for the plan: whether a gradient is wanted is part of its key.
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    forward = registry.implementation(name, impl).forward
    # A gradient that is only a view consists of torch's own calls, which have gradients themselves.
    apply = _direct_apply(name, impl) if needs_grad and name in _with_backward else None
    use_dispatcher = needs_grad and apply is None
    device = devices.index_of(inputs)  # fixed for the plan too

    def run(x: tuple[Any, ...], scalars: dict[str, Any]) -> Any:
        if use_dispatcher or not can_skip_dispatcher(x):
            return operator(*x, *scalars.values(), impl)
        # A comparison is all that a call pays whose tensors are on the current device.
        if device >= 0 and device != devices.current_index():
            return devices.call_on(device, run, x, scalars)
        return forward(*x, **scalars) if apply is None else apply(scalars, *x)

    def run_plain(x: tuple[Any, ...], scalars: dict[str, Any]) -> Any:
        # The rest of can_skip_dispatcher() is known for tensors like those of an earlier call.
        if is_observed():
            return run(x, scalars)
        if device >= 0 and device != devices.current_index():
            return devices.call_on(device, run, x, scalars)
        return forward(*x, **scalars) if apply is None else apply(scalars, *x)

    def repeat(x: tuple[Any, ...], scalars: dict[str, Any]) -> Function | None:
        scalars = dict(scalars)
        if apply is None:
            return repeated_call(partial(forward, **scalars), x, lambda *tensors: run(tensors, scalars))
        if registry.implementation(name, impl).backward is None:  # the backward says what to do
            return None
        schema, positions = _with_backward[name], _gradient_positions(name, _with_backward[name])
        kernels = Implemented.of(name, impl, scalars, schema, positions, can_skip_dispatcher)
        return repeated_call_with_gradient(kernels, x)

    repeats = name in _repeats and registry.implementation(name, impl).backend in BACKENDS
    return Plan(impl, run, None if use_dispatcher else run_plain, repeat if repeats else None)


def _call_traced(
    name: str, inputs: tuple[Any, ...], params: dict[str, Any], impl: str | None, batch_invariant: bool
) -> Any:
    chosen = impl
    if invariance.check_flag(name, batch_invariant) or invariance.anywhere:
        chosen = invariance.choose_traced(name, inputs[0].device.type, impl) or impl
    if chosen is None:
        chosen = choice.choose(name, inputs, params)
    if resolve(name, chosen) not in TRACED:
        return getattr(torch.ops.weft, name)(*inputs, *params.values(), chosen)
    return getattr(_traceable, f"{name}:{chosen}")(*inputs, **params)


def clear_caches() -> None:
    """Drop every earlier choice, after a table changed."""
    choice.clear_caches()
    plan_cache.clear()
    _applies.clear()


# ---- Fast path
#
# torch.library tells PyTorch's dispatcher of an operator, so that it is traced, profiled, transformed, and
# seen by modes and tensor subclasses. Each of these layers is Python and costs the host more than a launch
# does (docs/use/dispatch.md). If none of them is active, the implementation's forward is called as it is, or
# through a plain torch.autograd.Function if a gradient is wanted.


def can_skip_dispatcher(arguments: Iterable[Any]) -> bool:
    """True if nothing but the kernel would act on a call with these arguments.

    It is False for a tensor subclass, a lazily negated tensor, a tensor that a ``torch.func`` transform
    wrapped, an active dispatch or function mode (``FakeTensorMode``, selective checkpointing,
    ``with torch.device(...)``), a ``torch.func`` transform, a forward-mode gradient, a ``torch.jit`` trace,
    and a running profiler.
    """
    # The cheapest test first: a Python loop over a few tensors.
    for x in arguments:
        if type(x) in PLAIN_TYPES:
            if x.is_neg() or _is_wrapped(x):
                return False
        elif isinstance(x, torch.Tensor):
            return False
    return not (
        _dispatch_modes()
        or _function_modes()
        or _transforms()
        or _tracing_state()
        or _is_profiling()
        or forward_ad._current_level >= 0
    )


_with_backward: dict[str, Schema] = {}  # operators whose gradient is a kernel's
_repeats: set[str] = set()  # operators whose calls are recorded
_applies: dict[tuple[str, str], Function] = {}


def _direct_apply(name: str, impl: str) -> Function:
    """Return ``apply(params, *inputs)``, which runs an implementation with its backward as the gradient.

    It is for calls that pass :func:`can_skip_dispatcher`. The backward asks again, and goes through the
    dispatcher where it must. A gradient of the gradient is refused with a :class:`WeftError`.
    """
    apply = _applies.get((name, impl))
    if apply is None:
        methods = {
            "forward": staticmethod(_direct_forward(name, impl)),
            "backward": staticmethod(_direct_backward(name, impl)),
        }
        function: Any = type(f"weft_{name}", (torch.autograd.Function,), methods)
        # Defaults of the node's attributes: a node that sets none has no dictionary of its own.
        node = function._backward_cls
        node.impl, node.params, node.non_tensors = impl, {}, None
        apply = _applies[name, impl] = apply_without_checks(function)
    return apply


def _direct_forward(name: str, impl: str) -> Function:
    schema = _with_backward[name]
    forward = registry.implementation(name, impl).forward
    operator = registry.operator(name)
    save, save_gets_params = operator.save, operator.save_gets_params
    several = schema.outputs > 1
    saves_tensors_alone = schema.saves_tensors_alone()

    def run(ctx: Any, params: dict[str, Any], *inputs: Any) -> Any:
        output = forward(*inputs, **params)
        saved = save(inputs, output, **params) if save_gets_params else save(inputs, output)
        if saves_tensors_alone:
            ctx.save_for_backward(*saved)
        else:
            autograd_context.save(ctx, saved)
        if params:
            ctx.params = params
        if several:
            autograd_context.mark_outputs(ctx, output, schema)
        return output

    return run


def _direct_backward(name: str, impl: str) -> Function:
    schema = _with_backward[name]
    operator = getattr(torch.ops.weft, f"{name}_backward").default
    # Without a backward the forward works, and the backward says what to do.
    backward = backward_of(name, impl, schema) if registry.implementation(name, impl).backward else None
    backward = backward or partial(_refuse_backward, name, impl)
    shares = schema.shares_gradient
    takes, several = schema.differentiable_outputs, schema.outputs > 1
    single = schema.gradients == 1
    positions = _gradient_positions(name, schema)
    saves_tensors_alone = schema.saves_tensors_alone()
    # One None for `params`, which is the first argument of `apply`.
    in_order = positions == list(range(len(schema.input_names())))
    count = 1 + len(schema.input_names())

    def run(ctx: Any, *grads: Any) -> Any:
        if _is_grad_enabled():
            refuse_double_backward(name)
        if several:
            grads = autograd_context.materialised(ctx, grads[:takes])
        arguments = (*grads, *(ctx.saved_tensors if saves_tensors_alone else autograd_context.saved(ctx)))
        if can_skip_dispatcher(arguments):
            gradients = backward(*arguments, **ctx.params)
        else:
            gradients = operator(*arguments, *ctx.params.values(), impl)
            if single:
                gradients = (gradients,)
        if in_order:
            return (None, gradients[0], *gradients) if shares else (None, *gradients)
        placed = [None] * count
        for position, gradient in zip(positions, gradients, strict=True):
            placed[1 + position] = gradient
        return tuple(placed)

    return run


def _gradient_positions(name: str, schema: Schema) -> list[int]:
    """Return the positions of the differentiable inputs, in the order of the gradients."""
    names = schema.input_names()
    return [names.index(n) for n in schema.differentiable or registry.operator(name).differentiable]


# ---- Registration with torch.library


def register(name: str, schema: Schema) -> None:
    """Define ``weft::name`` and, if a kernel computes the gradient, ``weft::name_backward``."""
    num_params = len(schema.params)

    def split(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any], str]:
        # Positional arguments only: torch.library fills in no names.
        *rest, impl = arguments
        # torch.library passes all arguments by position: tensors, scalars, and `impl` last.
        cut = len(rest) - num_params
        return tuple(rest[:cut]), dict(zip(schema.params, rest[cut:], strict=True)), impl

    def forward(*arguments: Any) -> Any:
        inputs, params, impl = split(arguments)
        if schema.forward is not None:
            return schema.forward(impl, *inputs, **params)
        refuse_unsupported(name, impl, inputs, params)
        return registry.implementation(name, impl).forward(*inputs, **params)

    def fake(*arguments: Any) -> Any:
        inputs, params, _ = split(arguments)
        return schema.fake(*inputs, **(params if schema.fake_gets_params else {}))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, ctx.params, ctx.impl = split(inputs)
        if schema.save is not None:
            autograd_context.save(ctx, schema.save(tensors, output))
        else:
            autograd_context.save(ctx, registry.operator(name).saved(tensors, output, ctx.params))
        autograd_context.mark_outputs(ctx, output, schema)

    def differentiate(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        incoming = autograd_context.materialised(ctx, grads[: schema.differentiable_outputs])
        saved = autograd_context.saved(ctx)
        if schema.view_backward is not None:
            gradients = schema.view_backward(*incoming, *saved)
        else:
            backward = getattr(torch.ops.weft, f"{name}_backward")
            gradients = backward(*incoming, *saved, *ctx.params.values(), ctx.impl)
            gradients = (gradients,) if schema.gradients == 1 else gradients
            gradients = (gradients[0], *gradients) if schema.shares_gradient else gradients
        placed: list[Any] = [None] * (len(schema.input_names()) + num_params + 1)
        for position, gradient in zip(_gradient_positions(name, schema), gradients, strict=True):
            placed[position] = gradient
        return tuple(placed)

    if schema.repeats:
        _repeats.add(name)
    kind = "str?" if schema.optional_impl else "str"
    define(name, f"({schema.inputs}, {kind} impl) -> {_result(schema.outputs)}", forward, fake)
    if schema.outputs == 0 or schema.gradients == 0:
        return
    if schema.view_backward is None:
        _register_backward(name, schema, split)
        _with_backward[name] = schema
    torch.library.register_autograd(f"weft::{name}", differentiate, setup_context=setup_context, lib=library)


def _register_backward(name: str, schema: Schema, split: Callable[..., Any]) -> None:
    single = schema.gradients == 1

    def backward(*arguments: Any) -> Any:
        saved, params, impl = split(arguments)  # starts with the incoming gradients
        if schema.backward is not None:
            gradients = schema.backward(impl, *saved, **params)
        else:
            gradients = backward_of(name, impl, schema)(*saved, **params)
        return gradients[0] if single else gradients

    def fake(*arguments: Any) -> Any:
        assert schema.fake_backward is not None
        # Shapes only: the fake runs while tracing, without data.
        gradients = schema.fake_backward(*split(arguments)[0])
        return gradients[0] if single else gradients

    arguments = [f"Tensor grad{i or ''}" for i in range(schema.differentiable_outputs)]
    arguments += [schema.saved] if schema.saved else []  # a backward may need nothing but the gradient
    signature = f"({', '.join(arguments)}, str impl) -> {_result(schema.gradients)}"
    define(f"{name}_backward", signature, backward, fake)


def _result(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def define(name: str, signature: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    library.define(name + signature)
    # No CompositeImplicit registration: autograd would then trace into the kernel instead of its registered
    # gradient.
    library.impl(name, kernel, "CPU")
    library.impl(name, devices.on_device_of_arguments(name, kernel), "CUDA")
    torch.library.register_fake(f"weft::{name}", fake, lib=library)


_traceable = SimpleNamespace()  # a trace would read a dict as it was at its start


@choice.constant_while_tracing
def resolve(name: str, impl: str) -> str:
    """Return an implementation's backend. Put its function where a traced call finds it."""
    if without_suffix(impl) not in registry.implementation_names(name):
        raise unknown_name(f"implementation of {name}", impl, registry.implementation_names(name))
    implementation = registry.implementation(name, impl)
    forward = implementation.forward
    # torch.compile traces the function that `compile` wraps: a compiled function cannot be traced again.
    setattr(_traceable, f"{name}:{impl}", getattr(forward, "compiles", forward))
    return implementation.backend


def backward_of(name: str, impl: str, schema: Schema | None = None) -> Callable[..., Any]:
    """Return the backward of an implementation, as the schema asks. Raise WeftError if it has none."""
    backward: Any = registry.implementation(name, impl).backward or _refuse_backward(name, impl)
    return backward.shared if schema and schema.shares_gradient else backward  # type: ignore[no-any-return]


def _refuse_backward(name: str, impl: str, *unused: Any, **unused_params: Any) -> NoReturn:
    hint = "use another implementation: impl='torch', 'triton', 'cuda'"
    raise WeftError(f"{name} by {impl!r} has no backward", hint=hint)


_supported: set[tuple[Any, ...]] = set()


def refuse_unsupported(name: str, impl: str, inputs: tuple[Any, ...], params: dict[str, Any]) -> None:
    """Raise :class:`WeftError` with the reason if ``impl`` does not support this call here."""
    # Only shapes, dtypes and scalars decide about support: an answer holds for all calls that share them.
    scalars = [v for k, v in params.items() if k != "seed"]  # the seed differs in each step
    key = (name, impl, *((x.shape, x.dtype, x.device.type) for x in inputs), *scalars)
    if key in _supported:
        return
    specs = tuple(
        Input(name=f"input{i}", shape=tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."))
        for i, x in enumerate(inputs)
    )
    case = Case(name="call", inputs=specs, params=params)
    answer = support(registry.implementation(name, impl), case, inputs[0].device.type)
    if not answer:
        raise WeftError(
            f'{name}: impl="{impl}" is not available',
            got=answer.reason,
            hint="leave impl out, or see `weft ops`",
        )
    _supported.add(key)
