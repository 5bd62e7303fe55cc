"""The short way from a call to a kernel of ours, where nobody would hear of the long one.

``torch.library`` tells the dispatcher of an operator: so it is traced, profiled, transformed and
seen by modes and subclasses of tensors. Each of its layers is Python, and takes the host more
than a launch does (docs/dispatch.md). Where nothing of the kind is at hand, an implementation's
forward is called as it stands, or through a plain ``torch.autograd.Function`` where a gradient is
wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from weft.core import WeftError

PLAIN = (torch.Tensor, torch.nn.Parameter)
Run = Callable[..., Any]


def unheard(arguments: Iterable[Any]) -> bool:
    """Whether no one but us would make anything of an operator called with these arguments.

    That is: no subclass of tensors and none that is negated on paper only, no mode of dispatch or
    of functions (``FakeTensorMode``, selective checkpoints, ``with torch.device(...)``), no
    ``torch.func`` transform, no forward-mode gradient, no ``torch.jit`` trace and no profiler.
    """
    for x in arguments:
        if isinstance(x, torch.Tensor) and (type(x) not in PLAIN or x.is_neg()):
            return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack()
        or torch._C._get_tracing_state()
        or torch._C._autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    )


def function_of(name: str, forward: Run, keep: Run, differentiate: Run) -> Run:
    """``apply`` of an autograd function: ``forward(*arguments)``, then ``keep(ctx, arguments,
    output)``; backward is ``differentiate(ctx, *grads)``, of which there is no gradient."""

    def run(ctx: Any, *arguments: Any) -> Any:
        output = forward(*arguments)
        keep(ctx, arguments, output)
        return output

    def back(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True: what follows would lack this part of it
            raise WeftError(
                f"a gradient of {name}'s gradient",
                expected="backward without create_graph",
                got="create_graph=True",
                hint="impl='torch' can be differentiated as often as torch's own",
            )
        return differentiate(ctx, *grads)

    parts = {"forward": staticmethod(run), "backward": staticmethod(back)}
    made: Run = type(f"weft_{name}", (torch.autograd.Function,), parts).apply  # type: ignore[attr-defined]
    return made
