"""From a registry entry to a function that PyTorch can trace and differentiate, ``impl=`` named.

``eager``, ``torch`` and ``compile`` are plain torch code and are called as they stand, so that
autograd and ``torch.compile`` see through them. Kernels of our own go through a ``torch.library``
operator ``weft::NAME(..., str impl)`` with a fake kernel and a registered ``weft::NAME_backward``;
an eager call that nobody watches takes a shorter way to the same kernels (``direct.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from weft.backends import support
from weft.core import Case, Implementation, Input, WeftError, registry
from weft.core.operator import Operator, unknown_name
from weft.ops._shared import direct, dispatch

TRACED = ("eager", "torch", "compile")
DEVICES = ("cpu", "cuda")
Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
library = torch.library.Library("weft", "FRAGMENT")


def _nothing() -> None:
    """The check of a call whose arguments have been looked at."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """How an operator looks to PyTorch.

    ``inputs`` and ``saved`` are argument lists in torch.library's schema language, without
    ``impl``; ``fake(*inputs)`` gives the output's shape, dtype and strides (a tuple where there are
    several ``outputs``), ``fake_backward(grad, *saved)`` the gradients', one for each of the
    operator's differentiable inputs. Of the outputs the first ``graded`` take a gradient, each one
    a ``grad`` of the backward. ``params`` are the names of scalar arguments, last in ``inputs`` and
    ``saved`` alike; the fakes do not get them. Where the gradient is a mere view (a broadcast),
    ``view_backward(grad, *saved)`` gives it without a kernel, and ``saved``, ``gradients`` and
    ``fake_backward`` are not needed.
    """

    inputs: str
    fake: Callable[..., Any]
    saved: str = ""
    gradients: int = 1
    fake_backward: Callable[..., tuple[torch.Tensor, ...]] | None = None
    view_backward: Callable[..., tuple[torch.Tensor, ...]] | None = None
    params: tuple[str, ...] = ()
    outputs: int = 1
    graded: int = 1

    def tensors(self) -> list[str]:
        """The names of the tensors among the inputs, in order."""
        words = (argument.split() for argument in self.inputs.split(","))
        return [name for kind, name in words if kind.startswith("Tensor")]


def call(
    name: str,
    inputs: tuple[Any, ...],
    params: dict[str, Any],
    impl: str | None,
    check: Callable[[], None] = _nothing,
) -> Any:
    """Run operator ``name`` by the implementation ``impl`` (None: the one that dispatch chooses).

    ``check`` raises where the arguments have no answer. It looks at no tensor's contents, so that
    it is asked once for all calls with tensors and parameters like these. Raises
    :class:`WeftError` on an unknown ``impl``, or one that does not run here, with its reason.
    """
    if torch.compiler.is_compiling():
        check()
        return _traced(name, inputs, params, impl)
    return plan(name, inputs, params, impl, check).run(inputs, params)


@dataclass(frozen=True)
class Plan:
    """How calls of one kind are run: by whom, and ``run(inputs, params)``."""

    impl: str
    run: Run


def plan(
    name: str,
    inputs: tuple[Any, ...],
    params: dict[str, Any],
    impl: str | None,
    check: Callable[[], None] = _nothing,
) -> Plan:
    """The plan of a call that is not being traced; as :func:`call`, made once a kind of call."""

    def make() -> Plan:
        check()
        chosen = impl or dispatch.choose(name, inputs, params)
        if resolve(name, chosen) not in TRACED:
            return Plan(chosen, _kernels(name, chosen, inputs, params))
        if impl is not None:  # dispatch chooses none that is not supported
            refuse_unsupported(name, chosen, inputs, params)
        forward = registry.implementation(name, chosen).forward
        return Plan(chosen, lambda x, given: forward(*x, **given))

    return dispatch.recalled((name, impl), inputs, params, make)


def _kernels(name: str, impl: str, inputs: tuple[Any, ...], params: dict[str, Any]) -> Run:
    """How a kernel of ours is called: the short way where nobody hears of it (``direct.py``)."""
    operator = getattr(torch.ops.weft, name).default
    if any(x is not None and x.device.type not in DEVICES for x in inputs):  # described, not there
        return lambda x, given: operator(*x, *given.values(), impl)
    refuse_unsupported(name, impl, inputs, params)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    forward = registry.implementation(name, impl).forward
    # A gradient that is a view is torch's own calls, which have gradients themselves.
    apply = _functions.get(name, operator)

    def run(x: tuple[Any, ...], given: dict[str, Any]) -> Any:
        if not direct.unheard(x):
            return operator(*x, *given.values(), impl)
        return apply(*x, *given.values(), impl) if wanted else forward(*x, **given)

    return run


def _traced(name: str, inputs: tuple[Any, ...], params: dict[str, Any], impl: str | None) -> Any:
    chosen = impl or dispatch.choose(name, inputs, params)
    if resolve(name, chosen) not in TRACED:
        return getattr(torch.ops.weft, name)(*inputs, *params.values(), chosen)
    return getattr(_traceable, f"{name}:{chosen}")(*inputs, **params)


def register(name: str, schema: Schema) -> None:
    """Define ``weft::name`` and, where a kernel computes it, ``weft::name_backward``."""
    taken = len(schema.params)

    def split(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any], str]:
        *rest, impl = arguments
        cut = len(rest) - taken
        return tuple(rest[:cut]), dict(zip(schema.params, rest[cut:], strict=True)), impl

    def forward(*arguments: Any) -> Any:
        inputs, params, impl = split(arguments)
        refuse_unsupported(name, impl, inputs, params)
        return registry.implementation(name, impl).forward(*inputs, **params)

    def fake(*arguments: Any) -> Any:
        return schema.fake(*split(arguments)[0])

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, ctx.params, ctx.impl = split(inputs)
        saved = registry.operator(name).save(tensors, output)
        ctx.save_for_backward(*(s for s in saved if isinstance(s, torch.Tensor)))
        ctx.others = [None if isinstance(s, torch.Tensor) else s for s in saved]
        ctx.short = False
        if schema.outputs > schema.graded:
            ctx.mark_non_differentiable(*output[schema.graded :])
        if schema.outputs > 1:
            # A gradient of zeros for an output that nothing used, which is as large as it, is made
            # for those alone that the backward takes.
            ctx.set_materialize_grads(False)
            ctx.graded = [(o.shape, o.dtype, o.device) for o in output[: schema.graded]]

    def differentiate(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        tensors = iter(ctx.saved_tensors)
        saved = [next(tensors) if o is None else o for o in ctx.others]
        given = _materialised(ctx, grads[: schema.graded])
        if schema.view_backward is not None:
            gradients = schema.view_backward(*given, *saved)
        else:
            arguments = (*given, *saved, *ctx.params.values(), ctx.impl)
            short = ctx.short and direct.unheard(arguments)
            at = _backwards if short else torch.ops.weft
            gradients = getattr(at, f"{name}_backward")(*arguments)
            gradients = (gradients,) if schema.gradients == 1 else gradients
        found = dict(zip(registry.operator(name).differentiable, gradients, strict=True))
        return (*(found.get(one) for one in schema.tensors()), *([None] * (taken + 1)))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup_context(ctx, inputs, output)
        ctx.short = True

    define(name, f"({schema.inputs}, str impl) -> {_result(schema.outputs)}", forward, fake)
    if schema.view_backward is None:
        _register_backward(name, schema, split)
        _functions[name] = direct.function_of(name, forward, keep, differentiate)
    torch.library.register_autograd(
        f"weft::{name}", differentiate, setup_context=setup_context, lib=library
    )


_functions: dict[str, Callable[..., Any]] = {}  # the short ways of operators with a backward
_backwards = SimpleNamespace()


def _materialised(ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients, with zeros for those of outputs that nothing used."""
    if all(g is not None for g in grads):
        return grads
    return tuple(
        torch.zeros(shape, dtype=dtype, device=device) if g is None else g
        for g, (shape, dtype, device) in zip(grads, ctx.graded, strict=True)
    )


def _register_backward(name: str, schema: Schema, split: Callable[..., Any]) -> None:
    single = schema.gradients == 1

    def backward(*arguments: Any) -> Any:
        saved, params, impl = split(arguments)  # the gradients that come in are the first of them
        gradients = backward_of(name, impl)(*saved, **params)
        return gradients[0] if single else gradients

    def fake(*arguments: Any) -> Any:
        assert schema.fake_backward is not None
        gradients = schema.fake_backward(*split(arguments)[0])
        return gradients[0] if single else gradients

    grads = ", ".join(f"Tensor grad{i or ''}" for i in range(schema.graded))
    signature = f"({grads}, {schema.saved}, str impl) -> {_result(schema.gradients)}"
    define(f"{name}_backward", signature, backward, fake)
    setattr(_backwards, f"{name}_backward", backward)


def _result(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def define(name: str, signature: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    library.define(name + signature)
    for device in DEVICES:
        library.impl(name, kernel, device.upper())
    torch.library.register_fake(f"weft::{name}", fake, lib=library)


_traceable = SimpleNamespace()  # attributes: of a dict, a trace would see what it held at its start


@dispatch.settled_while_tracing
def resolve(name: str, impl: str) -> str:
    """The backend of an implementation, whose functions are put where a traced call finds them."""
    if impl not in registry.implementation_names(name):
        raise unknown_name(f"implementation of {name}", impl, registry.implementation_names(name))
    found = registry.implementation(name, impl)
    setattr(_traceable, f"{name}:{impl}", getattr(found.forward, "compiles", found.forward))
    return found.backend


def _operator(name: str) -> Operator:
    return registry.operator(name)


def _implementation(name: str, impl: str) -> Implementation:
    return registry.implementation(name, impl)


def backward_of(name: str, impl: str) -> Callable[..., Any]:
    found = registry.implementation(name, impl).backward
    if found is None:
        raise WeftError(
            f"{name} by {impl!r} has no backward",
            hint="name another: impl='torch', 'triton', 'cuda'",
        )
    return found


_supported: set[tuple[Any, ...]] = set()


def refuse_unsupported(
    name: str, impl: str, inputs: tuple[Any, ...], params: dict[str, Any]
) -> None:
    """Raise :class:`WeftError` with the reason where ``impl`` does not take this call here."""
    scalars = [v for k, v in params.items() if k != "seed"]  # which is another at each step
    key = (name, impl, *((x.shape, x.dtype, x.device.type) for x in inputs), *scalars)
    if key in _supported:
        return
    described = tuple(
        Input(name=f"input{i}", shape=tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."))
        for i, x in enumerate(inputs)
    )
    point = Case(name="call", inputs=described, params=params)
    answer = support(_implementation(name, impl), point, inputs[0].device.type)
    if not answer:
        hint = "leave impl out, or see `weft ops`"
        raise WeftError(f"{name} by {impl!r} does not run here", got=answer.reason, hint=hint)
    _supported.add(key)
