"""AdamW over a list of parameters in one launch; see README.md beside this."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch

from weft.backends import support
from weft.core import Case, Input, WeftError, registry
from weft.core.operator import unknown_name
from weft.ops._shared import dispatch
from weft.ops.adamw.lists import Begun, Numbers, Run, Tensors
from weft.ops.adamw.spec import NEAREST, NO_CLIP, STOCHASTIC, check_group, check_numbers
from weft.ops.adamw.tables import KEPT, Key, Kind, key_of

_RUNS: dict[str, Run] = {}
_BEGINS: dict[str, Callable[[tuple[Tensors, ...], Key, bool], Begun]] = {}


def adamw(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    step: int | torch.Tensor,
    max_norm: float | None = None,
    masters: Sequence[torch.Tensor] | None = None,
    rounding: str = NEAREST,
    seed: int = 0,
    impl: str | None = None,
) -> None:
    """One AdamW step over all parameters, in place, as ``torch.optim.AdamW`` takes it.

    Nothing waits for the device: the gradients' norm is computed, and its factor read, there. On a
    GPU a list takes one launch for each set of dtypes, and three with ``max_norm``.

    Args:
        params: tensors of any shapes; float32, float16 or bfloat16; on one device; overwritten.
        grads: one for each parameter, of its shape, float32 or its dtype; read only.
        exp_avgs, exp_avg_sqs: the averages, zeros at first, float32 or the parameter's dtype;
            overwritten.
        lr, betas, eps, weight_decay: as ``torch.optim.AdamW``'s; the decay is decoupled.
        step: how many steps this makes, from 1, as a number or as one number in a tensor on the
            parameters' device, which a CUDA graph may count up between replays.
        max_norm: the norm of all gradients together is clipped to this, as
            ``torch.nn.utils.clip_grad_norm_`` does, but leaves the gradients as they are.
        masters: float32 copies that half-precision parameters are rounded from; overwritten.
        rounding: ``"stochastic"`` rounds bfloat16 parameters up with a chance of what is cut off,
            so that small steps are not lost without a master; repeatable for one ``seed`` (below
            2^31), ``step`` and implementation.
        impl: an implementation's name (``weft ops`` lists them); None picks by the table.

    Raises:
        WeftError: lists of unlike lengths, tensors of unlike shapes or devices, a number out of
            its range; ``impl`` is unknown or does not run here; or a CUDA graph is captured over
            tensors that no step has seen before.

    Source: arXiv:1711.05101; stochastic rounding by Philox (Salmon et al., SC 2011).
    """
    bound = NO_CLIP if max_norm is None else max_norm
    check_numbers(lr, *betas, eps, weight_decay, step, bound)
    if torch.compiler.is_compiling():
        number, tensor = (0, step) if isinstance(step, torch.Tensor) else (step, None)
        lists = (list(x) for x in (params, grads, exp_avgs, exp_avg_sqs, masters or ()))
        scalars = (lr, *betas, eps, weight_decay, number, bound, rounding, seed)
        torch.ops.weft.adamw_(*lists, tensor, *scalars, impl)
        return
    numbers = Numbers(lr, *betas, eps, weight_decay, step, bound, rounding, seed)
    _run((params, grads, exp_avgs, exp_avg_sqs, () if masters is None else masters), numbers, impl)


def begin(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    *,
    masters: Sequence[torch.Tensor] | None = None,
    clips: bool = True,
    impl: str | None = None,
) -> Callable[..., None]:
    """:func:`adamw` in two parts: here what needs no number, so that the host does it while the
    gradients are still being computed; the answer takes the numbers, and launches.

    The lists are :func:`adamw`'s: tensors of any shapes, float32, float16 or bfloat16.

    Its keywords are ``lr``, ``betas``, ``eps``, ``weight_decay``, ``step`` and ``max_norm``, as
    :func:`adamw`'s. ``clips`` says whether ``max_norm`` may be given. No tensor may be moved or
    resized in between; their values may change.

    Raises:
        WeftError: as :func:`adamw`, here for the lists, by the answer for the numbers.
    """
    lists = (params, grads, exp_avgs, exp_avg_sqs, () if masters is None else masters)
    chosen, key = _chosen(lists, NEAREST, 0, impl)
    finish = _begun(chosen, lists, key, clips) if chosen else None

    def step(
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step: int | torch.Tensor,
        max_norm: float | None = None,
    ) -> None:
        bound = NO_CLIP if max_norm is None else max_norm
        check_numbers(lr, *betas, eps, weight_decay, step, bound)
        numbers = Numbers(lr, *betas, eps, weight_decay, step, bound)
        if finish:
            _check_step(step, params[0])
            with torch.no_grad():
                finish(numbers)

    return step


def _run(lists: tuple[Tensors, ...], numbers: Numbers, impl: str | None) -> None:
    chosen, key = _chosen(lists, numbers.rounding, numbers.seed, impl)
    if chosen:
        _check_step(numbers.step, lists[0][0])
        with torch.no_grad():
            _begun(chosen, lists, key, numbers.clips)(numbers)


def _begun(chosen: str, lists: tuple[Tensors, ...], key: Key | None, clips: bool) -> Begun:
    """The step over these lists but for its numbers; their tables stand where they have a key."""
    start = _BEGINS.get(chosen)
    return start(lists, key, clips) if start and key else partial(_RUNS[chosen], *lists)


def _chosen(
    lists: tuple[Tensors, ...], rounding: str, seed: int, impl: str | None
) -> tuple[str, Key | None]:
    """Who takes these lists ("" where they are empty), once they were checked; and their key.

    The check looks at shapes, dtypes, devices and layouts, and is made once for lists like these,
    wherever they lie.
    """
    _check_lists(lists)
    if not lists[0]:
        return "", None
    key = key_of(lists)
    flat = [t for x in lists for t in x]
    like = (*map(len, lists), *map(_shape, flat), *map(_dtype, flat), *map(_place, flat))
    told = (like, rounding, seed, impl)
    chosen = _accepted.get(told) if key else None
    if chosen is None:
        _check_tensors(lists, rounding, seed)
        chosen = impl or _choose(lists, rounding)
        _refuse_unsupported(chosen, lists, rounding)
        if key:
            _accepted[told] = chosen
            while len(_accepted) > KEPT:
                _accepted.popitem(last=False)
    return chosen, key


_shape, _dtype, _place = (attrgetter(name) for name in ("shape", "dtype", "device"))


_accepted: OrderedDict[tuple[Any, ...], str] = OrderedDict()  # calls that were checked, and by whom
_library = torch.library.Library("weft", "FRAGMENT")
_library.define(
    "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] masters, Tensor? step_tensor, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, int step, float max_norm, str rounding, int seed, str? impl) -> ()"
)


def _registered(*arguments: Any) -> None:
    """The step as a graph of ``torch.compile`` holds it: one node that overwrites its lists."""
    *given, impl = arguments
    lists, moving, scalars = tuple(given[:5]), given[5], list(given[6:])
    if moving is not None:
        scalars[5] = moving
    _run(lists, Numbers(*scalars), impl)


def _fake(*arguments: Any) -> None:
    return None


for _device in ("CPU", "CUDA"):
    _library.impl("adamw_", _registered, _device)
torch.library.register_fake("weft::adamw_", _fake, lib=_library)


def _kinds(lists: tuple[Tensors, ...]) -> set[Kind]:
    params, grads, exp_avgs, *_ = lists
    return {(p.dtype, g.dtype, m.dtype) for p, g, m in zip(params, grads, exp_avgs, strict=True)}


def _choose(lists: tuple[Tensors, ...], rounding: str) -> str:
    """By the table where torch can do it at all; else ours where that runs."""
    first = lists[0][0]
    alike = all(len(set(kind)) == 1 for kind in _kinds(lists))
    if alike and _lie_alike(lists) and not lists[4] and rounding != STOCHASTIC:
        elements = sum(p.numel() for p in lists[0])
        # As a case of one flat parameter with its gradient and averages is counted.
        found = dispatch.pick("adamw", first.device, first.dtype, 4 * elements, elements)
        return "torch" if found == "compile" else found
    return "triton" if first.device.type == "cuda" else "eager"


def _lie_alike(lists: tuple[Tensors, ...]) -> bool:
    """Whether each parameter, its gradient and its averages have the same strides."""
    return all(len({t.stride() for t in group}) == 1 for group in zip(*lists[:4], strict=True))


def _load(impl: str) -> None:
    if impl in _RUNS:
        return
    if impl not in registry.implementation_names("adamw"):
        raise unknown_name("implementation of adamw", impl, registry.implementation_names("adamw"))
    module = registry.REGISTRY["adamw"][impl].partition(":")[0]
    if impl == "compile":
        hint = "name another: impl='torch', 'triton', 'cuda'"
        raise WeftError("adamw by 'compile' takes one flat parameter, in the bench", hint=hint)
    found = import_module(f"weft.ops.adamw.{module}")
    _RUNS[impl] = found.run
    if hasattr(found, "begin"):
        _BEGINS[impl] = found.begin


NAMES = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters")


def _check_lists(lists: tuple[Any, ...]) -> None:
    for name, found in zip(NAMES, lists, strict=True):
        if not isinstance(found, list | tuple):
            raise WeftError(
                f"adamw: {name}", expected="a list of tensors", got=type(found).__name__
            )
        for i, x in enumerate(found):
            if not isinstance(x, torch.Tensor):
                raise WeftError(f"adamw: {name}[{i}]", expected="a tensor", got=type(x).__name__)
        if len(found) != len(lists[0]) and (found or name != "masters"):
            raise WeftError(
                f"adamw: {name}", expected=f"{len(lists[0])}, one a parameter", got=len(found)
            )


def _check_tensors(lists: tuple[Tensors, ...], rounding: str, seed: int) -> None:
    if rounding not in (NEAREST, STOCHASTIC):
        raise WeftError("adamw: rounding", expected=f"{NEAREST} or {STOCHASTIC}", got=rounding)
    if not 0 <= seed < 2**31:
        raise WeftError("adamw: seed", expected="from 0 to below 2^31", got=seed)
    first = lists[0][0]
    for i, group in enumerate(zip(*(x for x in lists if x), strict=True)):
        check_group(*group, where=f"s[{i}]")
        if group[0].device != first.device:
            raise WeftError(
                f"adamw: params[{i}].device", expected=first.device, got=group[0].device
            )
        if rounding == STOCHASTIC and (group[0].dtype != torch.bfloat16 or lists[4]):
            raise WeftError(
                "adamw: stochastic rounding",
                expected="bfloat16 parameters without float32 masters",
                got="masters" if lists[4] else group[0].dtype,
            )


def _check_step(step: int | torch.Tensor, param: torch.Tensor) -> None:
    if isinstance(step, torch.Tensor) and (step.numel() != 1 or step.device != param.device):
        raise WeftError(
            "adamw: step",
            expected=f"a number, or a tensor of one number on {param.device}",
            got=f"{tuple(step.shape)} on {step.device}",
        )


def _refuse_unsupported(impl: str, lists: tuple[Tensors, ...], rounding: str) -> None:
    """Raise :class:`WeftError` with the reason where ``impl`` does not take this call here."""
    _load(impl)
    names = ("param", "grad", "exp_avg", "exp_avg_sq", "master")
    lie = {"param": "contiguous" if _lie_alike(lists) else "transposed"}
    for kind in _kinds(lists):
        dtypes = [str(d).removeprefix("torch.") for d in (*kind, kind[2])]
        dtypes += ["float32"] if lists[4] else []
        inputs = tuple(
            Input(name=n, shape=(1, 1), dtype=d, layout=lie.get(n, "contiguous"))
            for n, d in zip(names, dtypes, strict=False)
        )
        point = Case(name="call", inputs=inputs, params={"rounding": rounding})
        answer = support(registry.implementation("adamw", impl), point, lists[0][0].device.type)
        if not answer:
            hint = "leave impl out, or see `weft ops`"
            raise WeftError(f"adamw by {impl!r} does not run here", got=answer.reason, hint=hint)
