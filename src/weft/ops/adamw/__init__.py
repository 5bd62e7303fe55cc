"""AdamW over a list of parameters in one launch; README.md in this folder describes it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch

from weft.backends import support
from weft.core import Case, Input, WeftError, registry
from weft.core.operator import unknown_name
from weft.dispatch import choice as dispatch
from weft.dispatch.devices import call_on
from weft.dispatch.operator import Schema, register
from weft.ops._common import validate
from weft.ops.adamw.parameter_groups import CACHE_SIZE, Dtypes, ListsKey, key_of
from weft.ops.adamw.spec import NEAREST, NO_CLIP, STOCHASTIC, check_group, check_numbers
from weft.ops.adamw.step import Numbers, PreparedStep, Run, StepLists, Tensors

_RUNS: dict[str, Run] = {}
_BEGINS: dict[str, Callable[[tuple[Tensors, ...], ListsKey, bool], PreparedStep]] = {}


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
    """Take one AdamW step over all parameters, in place, as ``torch.optim.AdamW`` does.

    The host does not wait for the device: the gradients' norm is computed and used there. On a GPU a list
    takes one launch for each set of dtypes, and three with ``max_norm``.

    Args:
        params: tensors of any shapes; float32, float16 or bfloat16; on one device; overwritten.
        grads: one for each parameter, of its shape, float32 or its dtype; read only.
        exp_avgs, exp_avg_sqs: the moving averages, zeros before the first step, float32 or the parameter's
            dtype; overwritten.
        lr, betas, eps, weight_decay: as ``torch.optim.AdamW``'s; the decay is decoupled.
        step: the number of this step, from 1: a number, or a tensor with one number on the parameters'
            device, which a CUDA graph may increment between replays.
        max_norm: clips the norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_`` does, but
            does not change the gradients.
        masters: float32 copies that half-precision parameters are rounded from; overwritten.
        rounding: ``"stochastic"`` rounds bfloat16 parameters up or down with probabilities that preserve
            the mean, so that small steps are not lost without a master. The result is repeatable for one
            ``seed`` (below 2^31), ``step`` and implementation.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Raises:
        WeftError: lists of different lengths, tensors of different shapes or devices, a number out of range,
            ``impl`` is unknown or does not run here, or a CUDA graph is captured over tensors that no step
            has seen before.

    Source: arXiv:1711.05101; stochastic rounding by Philox (Salmon et al., SC 2011).
    """
    bound = NO_CLIP if max_norm is None else max_norm
    check_numbers(lr, *_pair(betas), eps, weight_decay, step, bound)
    if torch.compiler.is_compiling():
        # A schema has no union of number and tensor: two arguments, one of which is used.
        number, tensor = (0, step) if isinstance(step, torch.Tensor) else (step, None)
        lists = (list(x) for x in (params, grads, exp_avgs, exp_avg_sqs, masters or ()))
        scalars = (lr, *betas, eps, weight_decay, number, bound, rounding, seed)
        torch.ops.weft.adamw_(*lists, tensor, *scalars, impl)
        return
    numbers = Numbers(lr, *betas, eps, weight_decay, step, bound, rounding, seed)
    _run((params, grads, exp_avgs, exp_avg_sqs, () if masters is None else masters), numbers, impl)


def _pair(betas: tuple[float, float]) -> tuple[float, float]:
    try:
        first, second = betas
    except (TypeError, ValueError) as error:
        raise WeftError("adamw: betas", expected="two numbers", got=f"{betas!r:.80}") from error
    return first, second


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
    """Prepare :func:`adamw`, and return a function that takes the numbers and launches the step.

    The host can prepare a step while the gradients are still being computed. The lists are those of
    :func:`adamw`: tensors of any shapes, float32, float16 or bfloat16. The returned function takes the
    keywords ``lr``, ``betas``, ``eps``, ``weight_decay``, ``step`` and ``max_norm``; the latter only with
    ``clips``. No tensor may be moved or resized in between; their values may change.

    Raises:
        WeftError: as :func:`adamw`, for the lists here and for the numbers in the returned function.
    """
    lists = (params, grads, exp_avgs, exp_avg_sqs, () if masters is None else masters)
    chosen, key = _check_and_choose(lists, NEAREST, 0, impl)
    finish = call_on(params[0].get_device(), _prepare, chosen, lists, key, clips) if chosen else None

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
        check_numbers(lr, *_pair(betas), eps, weight_decay, step, bound)
        numbers = Numbers(lr, *betas, eps, weight_decay, step, bound)
        if finish:
            _check_step(step, params[0])
            with torch.no_grad():
                call_on(params[0].get_device(), finish, numbers)

    return step


def _run(lists: tuple[Tensors, ...], numbers: Numbers, impl: str | None) -> None:
    chosen, key = _check_and_choose(lists, numbers.rounding, numbers.seed, impl)
    if chosen:
        _check_step(numbers.step, lists[0][0])
        with torch.no_grad():
            call_on(lists[0][0].get_device(), _step, chosen, lists, key, numbers)


def _step(chosen: str, lists: tuple[Tensors, ...], key: ListsKey | None, numbers: Numbers) -> None:
    _prepare(chosen, lists, key, numbers.clips)(numbers)


def _prepare(chosen: str, lists: tuple[Tensors, ...], key: ListsKey | None, clips: bool) -> PreparedStep:
    """Return the step over these lists, which needs only the numbers; write their tables if they have a
    key."""
    start = _BEGINS.get(chosen)
    return start(lists, key, clips) if start and key else partial(_RUNS[chosen], StepLists(*lists))


def _check_and_choose(
    lists: tuple[Tensors, ...], rounding: str, seed: int, impl: str | None
) -> tuple[str, ListsKey | None]:
    """Check the lists; return the implementation's name ("" for empty lists) and the lists' key.

    The check depends on shapes, dtypes, devices and layouts. Its result is cached for lists that are alike in
    these, at any addresses.
    """
    _check_lists(lists)
    if not lists[0]:
        return "", None
    key = key_of(lists)
    tensors = [t for x in lists for t in x]
    described = (*map(len, lists), *map(_shape, tensors), *map(_dtype, tensors), *map(_device, tensors))
    call_key = (described, rounding, seed, impl)
    # A hit skips all checks: with hundreds of parameters they would take longer than the step on the device.
    try:
        chosen = _accepted.get(call_key) if key else None
    except TypeError:  # an argument that has no hash is refused below
        key = chosen = None
    if chosen is None:
        _check_tensors(lists, rounding, seed)
        chosen = _choose(lists, rounding) if impl is None else impl
        _refuse_unsupported(chosen, lists, rounding)
        if key:
            _accepted[call_key] = chosen
            while len(_accepted) > CACHE_SIZE:
                _accepted.popitem(last=False)
    return chosen, key


_shape, _dtype, _device = (attrgetter(name) for name in ("shape", "dtype", "device"))


_accepted: OrderedDict[tuple[Any, ...], str] = OrderedDict()  # checked calls and their implementations


def _registered_step(
    impl: str | None, params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors,
    masters: Tensors, step_tensor: torch.Tensor | None, **numbers: Any,
) -> None:  # fmt: skip
    """Take the step inside a graph of ``torch.compile``, where it is one node that overwrites its lists."""
    if step_tensor is not None:
        numbers["step"] = step_tensor
    _run((params, grads, exp_avgs, exp_avg_sqs, masters), Numbers(**numbers), impl)


register(
    "adamw_",
    Schema(
        inputs=(
            "Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
            "Tensor(d!)[] masters, Tensor? step_tensor, float lr, float beta1, float beta2, float eps, "
            "float weight_decay, int step, float max_norm, str rounding, int seed"
        ),
        params=tuple(field.name for field in fields(Numbers)),
        outputs=0,
        fake=lambda *inputs: None,
        forward=_registered_step,
        optional_impl=True,
    ),
)


def _dtypes_of(lists: tuple[Tensors, ...]) -> set[Dtypes]:
    params, grads, exp_avgs, *_ = lists
    return {(p.dtype, g.dtype, m.dtype) for p, g, m in zip(params, grads, exp_avgs, strict=True)}


def _choose(lists: tuple[Tensors, ...], rounding: str) -> str:
    """Choose by the dispatch table if torch supports the lists; otherwise Weft's kernel, or eager."""
    first = lists[0][0]
    alike = all(len(set(dtypes)) == 1 for dtypes in _dtypes_of(lists))
    if alike and _same_strides(lists) and not lists[4] and rounding != STOCHASTIC:
        elements = sum(p.numel() for p in lists[0])
        # Counted as the bench case of one flat parameter with its gradient and averages.
        choice = dispatch.choose_by_size("adamw", first.device, first.dtype, 4 * elements, elements)
        # A compiled implementation takes one flat parameter and no list.
        return "torch" if choice == "compile" else choice
    return "triton" if first.device.type == "cuda" else "eager"


def _same_strides(lists: tuple[Tensors, ...]) -> bool:
    """True if each parameter, its gradient and its averages have the same strides."""
    return all(len({t.stride() for t in group}) == 1 for group in zip(*lists[:4], strict=True))


def _load(impl: str) -> None:
    if impl not in registry.implementation_names("adamw"):
        raise unknown_name("implementation of adamw", impl, registry.implementation_names("adamw"))
    if impl in _RUNS:
        return
    module = registry.entry("adamw").implementations[impl].partition(":")[0]
    if impl == "compile":
        hint = "name another: impl='torch', 'triton', 'cuda'"
        raise WeftError("adamw by 'compile' takes one flat parameter, in the bench", hint=hint)
    implementation = import_module(f"weft.ops.adamw.{module}")
    _RUNS[impl] = implementation.run
    if hasattr(implementation, "begin"):
        _BEGINS[impl] = implementation.begin


NAMES = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters")


def _check_lists(lists: tuple[Any, ...]) -> None:
    for name, tensors in zip(NAMES, lists, strict=True):
        if not isinstance(tensors, list | tuple):
            raise WeftError(f"adamw: {name}", expected="a list of tensors", got=type(tensors).__name__)
        for i, x in enumerate(tensors):
            if not isinstance(x, torch.Tensor):
                raise WeftError(f"adamw: {name}[{i}]", expected="a tensor", got=type(x).__name__)
        if len(tensors) != len(lists[0]) and (tensors or name != "masters"):
            expected = f"{len(lists[0])}, one for each parameter"
            raise WeftError(f"adamw: {name}", expected=expected, got=len(tensors))


def _check_tensors(lists: tuple[Tensors, ...], rounding: str, seed: int) -> None:
    validate.one_of("adamw: rounding", rounding, (NEAREST, STOCHASTIC))
    if not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise WeftError("adamw: seed", expected="from 0 to below 2^31", got=seed)
    first = lists[0][0]
    for i, group in enumerate(zip(*(x for x in lists if x), strict=True)):
        check_group(*group, where=f"s[{i}]")
        validate.same_device("adamw", f"params[0] and params[{i}]", first, group[0])
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
            hint=f"step.to({str(param.device)!r})",
        )


def _refuse_unsupported(impl: str, lists: tuple[Tensors, ...], rounding: str) -> None:
    """Raise :class:`WeftError` with the reason if ``impl`` does not support this call here."""
    _load(impl)
    names = ("param", "grad", "exp_avg", "exp_avg_sq", "master")
    layouts = {"param": "contiguous" if _same_strides(lists) else "transposed"}
    for group_dtypes in _dtypes_of(lists):
        dtypes = [str(d).removeprefix("torch.") for d in (*group_dtypes, group_dtypes[2])]
        dtypes += ["float32"] if lists[4] else []
        inputs = tuple(
            Input(name=n, shape=(1, 1), dtype=d, layout=layouts.get(n, "contiguous"))
            for n, d in zip(names, dtypes, strict=False)
        )
        point = Case(name="call", inputs=inputs, params={"rounding": rounding})
        answer = support(registry.implementation("adamw", impl), point, lists[0][0].device.type)
        if not answer:
            hint = "leave impl out, or see `weft ops`"
            raise WeftError(f'adamw: impl="{impl}" is not available', got=answer.reason, hint=hint)
