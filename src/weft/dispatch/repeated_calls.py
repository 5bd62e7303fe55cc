"""Calls of one kind that come again: each is one generated function, with its gradient as another one.

The first calls of a kind run the implementation as it is. Then one is recorded, and a function is generated
that allocates, launches and returns for tensors like these (backends/recorded_call.py, generated_call.py).
Where a gradient is wanted, it is the forward of a ``torch.autograd.Function``, whose backward is recorded in
the same way.

Whoever calls such a function compares the tensors with the recorded ones (plan_cache.py), and makes sure that
no mode, profiler or forward-mode gradient is active: :func:`is_observed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from weft.backends.generated_call import Template, generate
from weft.backends.recorded_call import NotRecordableError, Recording, record
from weft.core import registry
from weft.dispatch import autograd_context, devices
from weft.dispatch.plan_cache import RECORDED_CALL, Entry, comparison_of

Function = Callable[..., Any]
MAX_GRADIENTS = 4  # kinds of gradients of one forward that are compared
BACKENDS = ("cuda", "triton")  # whose launches are noted
SAVED = object()  # stands for a saved tensor
records_on_cpu = False  # True in tests, whose kernels take tensors of the host

_is_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_is_profiling = torch._C._autograd._profiler_enabled


def is_observed() -> bool:
    """True if something acts on a call that a comparison of its tensors does not see."""
    return bool(_function_modes() or _dispatch_modes() or _is_profiling() or forward_ad._current_level >= 0)


@dataclass(frozen=True, kw_only=True)
class Implemented:
    """One operator by one implementation, for calls with the scalars ``params``.

    ``backward(*grads, *saved)`` returns a gradient for each of ``positions``, the differentiable inputs;
    ``saved(inputs, output)`` what it needs. ``dispatched_backward`` does the same by PyTorch's dispatcher,
    and ``can_skip_dispatcher(tensors)`` tells whether that may be left out. ``differentiable_outputs`` and
    ``outputs`` are counts. ``fixed`` are placeholders among what the backward needs, the same in each call.
    """

    name: str
    impl: str
    params: dict[str, Any]
    forward: Function
    backward: Function
    dispatched_backward: Function
    saved: Callable[[tuple[Any, ...], Any], Sequence[Any]]
    can_skip_dispatcher: Callable[[Sequence[Any]], bool]
    positions: Sequence[int]
    num_inputs: int
    outputs: int = 1
    differentiable_outputs: int = 1
    fixed: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        impl: str,
        params: dict[str, Any],
        schema: Any,
        positions: Sequence[int],
        can_skip_dispatcher: Callable[[Any], bool],
    ) -> Implemented:
        """Return what is known of an operator of the registry with this schema (operator.py)."""
        operator, implementation = registry.operator(name), registry.implementation(name, impl)
        through_dispatcher = getattr(torch.ops.weft, f"{name}_backward").default
        # An implementation without a backward is not asked for.
        backward: Any = implementation.backward
        compute = backward.shared if schema.shares_gradient else backward

        def unshared(gradients: Any) -> Any:
            return (gradients[0], *gradients) if schema.shares_gradient else gradients

        def dispatched_backward(*arguments: Any) -> Any:
            gradients = through_dispatcher(*arguments, *params.values(), impl)
            return unshared((gradients,) if schema.gradients == 1 else gradients)

        return cls(
            name=name,
            impl=impl,
            params=params,
            forward=partial(implementation.forward, **params),
            backward=lambda *arguments: unshared(compute(*arguments, **params)),
            dispatched_backward=dispatched_backward,
            saved=lambda inputs, output: operator.saved(inputs, output, params),
            can_skip_dispatcher=can_skip_dispatcher,
            positions=positions,
            num_inputs=len(schema.input_names()),
            outputs=schema.outputs,
            differentiable_outputs=schema.differentiable_outputs,
        )

    def with_constants(self, rest: tuple[Any, ...]) -> Implemented:
        """Return the same for calls whose last inputs are ``rest``, and have no gradient."""
        count, forward = self.num_inputs - len(rest), self.forward
        backward, dispatched = self.backward, self.dispatched_backward
        indices = [i for i, position in enumerate(self.positions) if position < count]
        return replace(
            self,
            forward=lambda *inputs: forward(*inputs, *rest),
            backward=partial(_some_of, backward, indices),
            dispatched_backward=partial(_some_of, dispatched, indices),
            saved=lambda inputs, output: self.saved((*inputs, *rest), output),
            positions=[self.positions[i] for i in indices],
            num_inputs=count,
            fixed=rest,
        )

    def split(self, saved: Sequence[Any]) -> tuple[tuple[torch.Tensor, ...], list[Any]]:
        """Return the tensors to be saved, and everything else with SAVED in their places."""
        constants = [
            SAVED if isinstance(s, torch.Tensor) and not any(s is f for f in self.fixed) else s for s in saved
        ]
        return tuple(s for s, c in zip(saved, constants, strict=True) if c is SAVED), constants


def _some_of(function: Function, indices: Sequence[int], *arguments: Any) -> tuple[Any, ...]:
    results = function(*arguments)
    return tuple(results[i] for i in indices)


def repeated_call_of(kernels: Implemented, inputs: tuple[Any, ...]) -> Function | None:
    """Return ``function(*inputs)``, with a gradient where one is wanted, or None if none can be generated."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return repeated_call_with_gradient(kernels, inputs)
    device = devices.index_of(inputs)
    return repeated_call(kernels.forward, inputs, partial(devices.call_on, device, kernels.forward))


def is_due(entry: Entry) -> bool:
    """Count a call like a recent one that has no function of its own; True if it is to be recorded.

    A call whose launches are captured in a CUDA graph is not: its kernels would be launched twice there.
    """
    entry.calls += 1
    if entry.calls != RECORDED_CALL:
        return False
    if is_unfit_to_record():
        entry.calls -= 1  # the next one
        return False
    return True


def is_unfit_to_record() -> bool:
    """True while something observes calls, or while launches are captured in a CUDA graph."""
    return is_observed() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _is_current(device: int) -> Callable[[], bool] | None:
    """Return a test of the current device; None where it is the only one."""
    if device == devices.NO_GPU or torch.cuda.device_count() == 1:
        return None
    return lambda: devices.current_index() == device


def _record(function: Function, inputs: tuple[Any, ...], device: int) -> Recording | None:
    if device == devices.NO_GPU and not records_on_cpu:
        return None
    try:
        return devices.call_on(device, record, function, inputs)  # type: ignore[no-any-return]
    except torch.OutOfMemoryError:  # the call itself may fit
        return None


def repeated_call(forward: Function, inputs: tuple[Any, ...], fallback: Function) -> Function | None:
    """Return ``function(*inputs)`` for calls that want no gradient, or None if none can be generated.

    ``fallback(*inputs)`` runs the implementation as it is.
    """
    device = devices.index_of(inputs)
    recording = _record(forward, inputs, device)
    if recording is None:
        return None
    template = Template(
        name="repeated_forward",
        fallback=fallback,
        results=_as_tuple(recording.output),
        ending=(f"return {_as_text(recording.output)}",),
        check_device=_is_current(device),
    )
    return _generated(recording, template)


def repeated_call_with_gradient(kernels: Implemented, inputs: tuple[Any, ...]) -> Function | None:
    """Return ``apply(*inputs)`` of an autograd function, or None if none can be generated."""
    device = devices.index_of(inputs)
    recording = _record(kernels.forward, inputs, device)
    if recording is None:
        return None
    outputs = _as_tuple(recording.output)
    tensors, constants = kernels.split(kernels.saved(inputs, recording.output))
    count = len(outputs)
    places = "".join(f"{{{count + i}}}, " for i in range(len(tensors)))
    # What ctx.save_for_backward and its like do; they are functions in Python.
    ending = [f"ctx.to_save = ({places})"]
    if kernels.outputs > 1:
        rest = "".join(f"{{{i}}}, " for i in range(kernels.differentiable_outputs, count))
        ending += ["ctx.materialize_grads = False", *([f"ctx.non_differentiable = ({rest})"] if rest else [])]

    def fallback(ctx: Any, *tensors: Any) -> Any:
        output = kernels.forward(*tensors)
        ctx.save_for_backward(*kernels.split(kernels.saved(tensors, output))[0])
        if kernels.outputs > 1:
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*output[kernels.differentiable_outputs :])
        return output

    template = Template(
        name="repeated_forward",
        fallback=fallback,
        results=(*outputs, *tensors),
        ending=(*ending, f"return {_as_text(recording.output)}"),
        before=("ctx",),
        check_device=_is_current(device),
    )
    forward = _generated(recording, template)
    if forward is None:
        return None
    backward = _backward(kernels, constants, outputs, device)
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(f"weft_{kernels.name}", (torch.autograd.Function,), methods)
    node = function._backward_cls
    # PyTorch's `apply` of a node is Python, which looks for the function that is called here at once.
    node.apply = backward
    node.impl, node.params = kernels.impl, kernels.params
    return autograd_context.apply_without_checks(function)


def _generated(recording: Recording, template: Template) -> Function | None:
    try:
        return generate(recording, template)
    except NotRecordableError:
        return None


def _as_tuple(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


def _as_text(output: Any) -> str:
    """Return the expression of a call's output: results of its template."""
    if not isinstance(output, tuple):
        return "{0}"
    return "(" + "".join(f"{{{i}}}, " for i in range(len(output))) + ")"


def _backward(
    kernels: Implemented, constants: list[Any], outputs: tuple[torch.Tensor, ...], device: int
) -> Function:
    """Return the backward of an autograd function.

    ``constants`` are what the backward gets besides tensors, with SAVED in the place of each tensor.
    """
    name, takes, several = kernels.name, kernels.differentiable_outputs, kernels.outputs > 1
    zeros_like = [(o.shape, o.dtype, o.device) for o in outputs[:takes]]
    entries: tuple[Entry, ...] = ()

    def compute(*tensors: Any) -> tuple[Any, ...]:
        return tuple(kernels.backward(*_merged(tensors, constants, takes)))

    def in_order(gradients: Sequence[Any]) -> tuple[Any, ...]:
        placed: list[Any] = [None] * kernels.num_inputs
        for position, gradient in zip(kernels.positions, gradients, strict=True):
            placed[position] = gradient
        return tuple(placed)

    def run_as_it_is(*tensors: Any) -> tuple[Any, ...]:
        if kernels.can_skip_dispatcher(tensors):
            return in_order(compute(*tensors))
        return in_order(kernels.dispatched_backward(*_merged(tensors, constants, takes)))

    def generated(tensors: tuple[Any, ...]) -> Function | None:
        recording = _record(compute, tensors, device)
        if recording is None:
            return None
        gradients = recording.output
        names = in_order([f"{{{i}}}" for i in range(len(gradients))])
        template = Template(
            name="repeated_backward",
            fallback=run_as_it_is,
            results=gradients,
            ending=(f"return ({''.join(f'{n}, ' for n in names)})",),
        )
        return _generated(recording, template)

    def run_unlike(tensors: tuple[Any, ...]) -> Any:
        """Run a kind of backward that has no function yet."""
        nonlocal entries
        if kernels.can_skip_dispatcher(tensors):
            entry = next((e for e in entries if e.is_alike(*tensors)), None)
            if entry is None and len(entries) < MAX_GRADIENTS and (new := comparison_of(tensors)):
                entry = Entry(new, None)
                entries = (*entries, entry)
            if entry is not None and is_due(entry):
                entry.direct = generated(tensors)
        return run_as_it_is(*tensors)

    def backward(ctx: Any, *grads: Any) -> Any:
        if _is_grad_enabled():
            autograd_context.refuse_double_backward(name)
        tensors = (*grads[:takes], *ctx.saved_tensors) if several else (*grads, *ctx.saved_tensors)
        for entry in entries:
            if entry.is_alike(*tensors):
                if (direct := entry.direct) is None or is_observed():
                    break
                return direct(*tensors)
        if several:
            tensors = (*_with_zeros(tensors[:takes], zeros_like), *tensors[takes:])
        return run_unlike(tensors)

    return backward


def _merged(tensors: tuple[Any, ...], constants: list[Any], takes: int) -> tuple[Any, ...]:
    """Return gradients and saved tensors with the constants among the latter."""
    saved = iter(tensors[takes:])
    return (*tensors[:takes], *(next(saved) if c is SAVED else c for c in constants))


def _with_zeros(grads: Sequence[Any], like: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the gradients, with zeros for outputs that nothing used."""
    return tuple(
        torch.zeros(shape, dtype=dtype, device=device) if g is None else g
        for g, (shape, dtype, device) in zip(grads, like, strict=True)
    )
