"""Batch invariance: calls whose rows have the same bits whatever is computed beside them.

Dispatch chooses by the number of elements, and an implementation may choose its configuration by it, so that
a row gets other bits in a larger batch. ``with weft.batch_invariant():`` and ``batch_invariant=True`` ask for
one of the *variants* that implementations declare (``with_invariant`` in weft/core/implementation.py). The
choice among them depends on the device, the operator, the columns, the dtype and the parameters, never on the
number of rows. The variant's name travels with the call, as every implementation's does: the backward takes
the same variant, wherever it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from weft.backends import support
from weft.backends.support import backend_support
from weft.core import BACKWARD, FORWARD, Case, Implementation, WeftError, registry
from weft.core.implementation import without_suffix
from weft.dispatch import choice, keys

# The first that has a variant for a call runs it. A CPU has one variant for each operator, torch's or eager.
PREFERENCE = {"cuda": ("cuda", "triton"), "cpu": ("torch", "eager")}
BATCH_REDUCTIONS = ("sum",)  # they have no rows: the whole batch is one result
BY_POSITION = "an element is dropped or kept by its position in the batch"
NONE_YET = "none of its implementations is batch invariant"
WHY_NOT = {  # in place of NONE_YET
    "dropout": BY_POSITION,
    "dropout_add_layer_norm": BY_POSITION,
}

_requested: ContextVar[bool] = ContextVar("weft_batch_invariant", default=False)
_lock = threading.Lock()
_blocks = 0  # `with` blocks that are open in any thread
# True while a `with` block is open in any thread: one cheap test for the calls of all others. torch.compile
# guards a graph by it, which it cannot by a context variable.
anywhere = False


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Compute the rows of all calls in this block in the same way whatever the batch is.

    The bits of a row then do not depend on the rows beside it, on its place, or on how the batch is cut. This
    holds for the outputs and for the gradients of inputs that have rows, also if ``backward()`` is called
    after the block. Gradients of weights add up the rows, and may differ. The block counts for this thread
    or task. ``torch.compile`` traces again inside it.

    A query of attention has the same bits also in a sequence of another length, so that a token that is
    decoded with cached keys equals the same token of a whole sequence.

    A call raises :class:`WeftError` if the operator has no batch-invariant implementation for it. On a GPU
    attention and products have one on Hopper alone, and dropout depends on the position by its definition.
    """
    _open(1)
    token = _requested.set(True)
    try:
        yield
    finally:
        _requested.reset(token)
        _open(-1)


def _open(change: int) -> None:
    global _blocks, anywhere
    with _lock:
        _blocks += change
        anywhere = _blocks > 0


def is_requested() -> bool:
    """True inside ``with batch_invariant():``; while tracing, if such a block is open in any thread."""
    return anywhere and (torch.compiler.is_compiling() or _requested.get())


def check_flag(name: str, batch_invariant: object) -> bool:
    """Return the argument ``batch_invariant`` of a call; raise :class:`WeftError` unless it is a bool."""
    if not isinstance(batch_invariant, bool):
        got = f"{batch_invariant!r:.80}"
        raise WeftError(f"{name}: batch_invariant", expected="True or False", got=got)
    return batch_invariant


def wants(name: str, batch_invariant: bool) -> bool:
    """True if a call asks for batch invariance, by its argument or by a block around it."""
    return check_flag(name, batch_invariant) or is_requested()


def refuse_if_requested(name: str, batch_invariant: bool = False) -> None:
    """Raise :class:`WeftError` if a call of an operator without variants asks for batch invariance."""
    if wants(name, batch_invariant):
        raise _refusal(name, WHY_NOT.get(name, NONE_YET))


def _refusal(name: str, reason: str, *, another: bool = False) -> WeftError:
    """Return the error; ``another``: dispatch would find another implementation if ``impl`` were left out."""
    hint = "call it outside of `with weft.batch_invariant():`, without batch_invariant=True"
    if another:
        hint = "leave impl out"
    return WeftError(
        f"{name}: batch invariance",
        expected="an implementation whose rows do not depend on the batch",
        got=reason,
        hint=hint,
    )


def choose(name: str, inputs: Sequence[Any], params: Mapping[str, Any], impl: str | None) -> str | None:
    """Return the name of the variant that runs a call; of ``impl``, if it is given.

    None: the operator adds up the batch, and has no rows. Raises :class:`WeftError` with the reason if there
    is no variant for the call.
    """
    if name in BATCH_REDUCTIONS:
        return None
    tensors = [x for x in inputs if x is not None]
    case = keys.call_case(name, tensors, params)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return variant_at(case, name, tensors[0].device.type, impl, grad=grad).name


def variant_at(case: Case, name: str, device: str, impl: str | None, *, grad: bool) -> Implementation:
    """Return the variant that runs the operator ``name`` at a case; ``grad``: a gradient is wanted."""
    reason = ""
    for variant in _variants(name, device, impl):
        answers = [support(variant, case, device, d) for d in ((FORWARD, BACKWARD) if grad else (FORWARD,))]
        if all(answers):
            return variant
        reason = reason or f"{variant.name}: {next(a.reason for a in answers if not a)}"
    raise _refusal(name, reason, another=impl is not None)


@choice.constant_while_tracing
def choose_traced(name: str, device: str, impl: str | None) -> str | None:
    """Return what :func:`choose` does, for a traced call, whose shapes may be symbolic."""
    if name in BATCH_REDUCTIONS:
        return None
    reason = ""
    for variant in _variants(name, device, impl):
        answer = backend_support(variant.backend, device)
        if variant.backend in choice.BASELINES:
            reason = reason or f"torch.compile, which chooses how {variant.name} adds up a row by the batch"
        elif answer:
            return variant.name
        reason = reason or f"{variant.name}: {answer.reason}"
    raise _refusal(name, reason)


def _variants(name: str, device: str, impl: str | None) -> Iterator[Implementation]:
    """Yield the variants for a device in the order of preference; there is at least one."""
    names = registry.implementation_names(name)
    if impl is not None:
        variant = registry.implementation(name, without_suffix(impl)).invariant
        if variant is None:
            another = any(registry.implementation(name, n).invariant for n in PREFERENCE["cpu"] if n in names)
            reason = f"impl={impl!r}, whose rows may depend on the batch"
            raise _refusal(name, reason if another else WHY_NOT.get(name, NONE_YET), another=another)
        yield variant
        return
    # One after another: a backend that is not needed is not imported.
    has_variant = False
    for variant in (registry.implementation(name, n).invariant for n in PREFERENCE[device] if n in names):
        if variant is not None:
            has_variant = True
            yield variant
    if not has_variant:
        elsewhere = any(registry.implementation(name, n).invariant for n in PREFERENCE["cuda"] if n in names)
        none_here = f"none of its implementations is batch invariant on a {device.upper()}"
        raise _refusal(name, none_here if elsewhere else WHY_NOT.get(name, NONE_YET))
