"""Calls of the operators with strange arguments: a result or one clear error, before anything is launched."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from helpers.fuzzing import Hung, deadline, generator
from helpers.operator_calls import example
from weft import WeftError, ops
from weft.core import registry

OPERATORS = tuple(registry.operator_names())
IMPLEMENTATIONS: tuple[object, ...] = (
    "eager",
    "torch",
    "no-such",
    "",
    "\x1b[2K",
    5,
    True,
    [],
    object(),
    b"torch",
)
SCALARS: tuple[object, ...] = (
    *(None, True, -1, 0, 1, 0.5, 1.5, float("nan"), float("inf"), 2**31, 2**63, 2**70, -(2**70)),
    *("x", "", [], {}, (), b"x", object(), 1j, torch.tensor(0.5), torch.ones(3), torch.float32),
)


class Mine(torch.Tensor):
    """Tensor subclass of all arguments, since torch refuses a call with two unrelated subclasses."""


def _computable(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor without gradient; fp8, which torch can neither negate nor convert, as float32."""
    x = x.detach()
    return x.float() if x.is_floating_point() and x.itemsize == 1 else x


# Each turns a valid tensor into an unusual one.
STRANGE: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda x: torch.nested.nested_tensor([x.detach().flatten()[:3].float(), torch.ones(5)]),
    lambda x: torch.nested.nested_tensor(
        [x.detach().flatten()[:3].float(), torch.ones(5)], layout=torch.jagged
    ),
    lambda x: _computable(x).to_sparse(),
    lambda x: x.detach().to("meta"),
    lambda x: x.detach().to(torch.complex64),
    lambda x: torch.quantize_per_tensor(torch.ones(x.shape), 0.1, 0, torch.qint8),
    lambda x: x.detach().flatten()[:1].expand(2**40),
    lambda x: x.detach().flatten()[:1].view(()).expand(2**20, 2**20),
    lambda x: x.detach().half(),
    lambda x: x.detach().double(),
    lambda x: x.detach().bool(),
    lambda x: x.detach().to(torch.float8_e4m3fn),
    lambda x: x.detach()[..., :0],
    lambda x: x.detach()[:0],
    lambda x: x.detach().flatten(),
    lambda x: x.detach().unsqueeze(0),
    lambda x: x.detach().mT if x.dim() > 1 else x.detach()[::2],
    lambda x: x.detach()[..., ::2],
    lambda x: torch.zeros(()),
    lambda x: torch.zeros(*[1] * 20),
    lambda x: -_computable(x) if x.is_floating_point() else x.detach() + 10**9,
    lambda x: torch._neg_view(_computable(x)) if x.is_floating_point() else x,
    lambda x: x.detach().as_subclass(Mine),
    lambda x: torch.nn.Parameter(x.detach(), requires_grad=x.is_floating_point()),
    lambda x: _computable(x).numpy(),
    lambda x: x.detach().tolist(),
    lambda x: None,
    lambda x: 3,
    lambda x: "x",
    lambda x: [x],
)


def _changed(arguments: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return the arguments with one to three of them replaced."""
    changed = dict(arguments)
    for name in rng.sample(sorted(changed), min(len(changed), rng.choice((1, 1, 2, 3)))):
        value = changed[name]
        if isinstance(value, torch.Tensor):
            changed[name] = (
                rng.choice(STRANGE if value.dim() else STRANGE[-7:])(value)
                if rng.random() < 0.9
                else rng.choice(SCALARS)
            )
        elif isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
            changed[name] = rng.choice(
                ([], [*value, *value], [rng.choice(STRANGE)(value[0])], None, value[0])
            )
        else:
            changed[name] = rng.choice(SCALARS)
    return changed


def _good_arguments(name: str, number: int) -> dict[str, Any]:
    if name == "adamw":  # takes lists, which no case has
        lists = ("params", "grads", "exp_avgs", "exp_avg_sqs")
        return {n: [torch.ones(3, 4), torch.ones(5)] for n in lists} | {"step": 1, "lr": 0.1}
    good = example(name, seed=number)
    return {**good.inputs, **good.params}


def _call(number: int) -> str:
    """Make one call; return how it ended."""
    rng = generator("call", number)
    name = OPERATORS[number % len(OPERATORS)]
    function = getattr(ops, name)
    arguments = _good_arguments(name, number)
    parameters = inspect.signature(function).parameters.values()
    scalars = {p.name for p in parameters if p.default is not p.empty} - {"impl", *arguments}
    arguments |= {
        k: rng.choice(SCALARS)
        for k in rng.sample(sorted(scalars), min(len(scalars), 1))
        if rng.random() < 0.3
    }
    arguments = _changed(arguments, rng)
    if rng.random() < 0.3:
        arguments["impl"] = rng.choice(IMPLEMENTATIONS)
    call = partial(function, **arguments)
    tensors = {k: torch.stack([v, v]) for k, v in arguments.items() if _can_be_batched(v)}
    batched = bool(tensors) and rng.random() < 0.1
    if batched:
        fixed = {k: v for k, v in arguments.items() if k not in tensors}
        call = partial(torch.vmap(lambda x: function(**fixed, **x)), tensors)
    try:
        with deadline(), torch.set_grad_enabled(rng.random() < 0.5):
            call()
    except WeftError:
        return "refused"
    except (Exception, Hung) as error:
        # Under vmap the value of a label cannot be read beforehand: torch's own error names it.
        if batched and "out of bounds" in str(error):
            return "refused"
        described = {k: _described(v) for k, v in arguments.items()}
        raise AssertionError(f"example {number}: {name}({described})") from error
    return "returned"


def _can_be_batched(value: object) -> bool:
    return (
        type(value) is torch.Tensor and not value.is_nested and value.numel() < 1 << 20 and _is_plain(value)
    )


def _is_plain(x: torch.Tensor) -> bool:
    return x.layout == torch.strided and not x.is_quantized


def _described(value: object) -> object:
    if not isinstance(value, torch.Tensor) or value.is_nested:
        return f"{value!r:.60}"
    return type(value).__name__, tuple(value.shape), value.dtype, value.layout, value.device.type


def _fuzz(count: int) -> None:
    endings = [_call(number) for number in range(count)]
    assert endings.count("refused") > count // 4 and "returned" in endings


def test_numbers_beyond_64_bits() -> None:
    logits, targets = torch.randn(3, 5), torch.tensor([0, 4, 2])
    huge = ops.cross_entropy(logits, targets, z_loss=2**70, impl="torch")
    assert huge > 1e20
    assert torch.equal(huge, ops.cross_entropy(logits, targets, z_loss=2.0**70, impl="torch"))
    lists = [[torch.ones(3)] for _ in range(4)]
    for wrong in ({"eps": 2**70}, {"lr": 10**400}, {"step": 2**63}):
        with pytest.raises(WeftError, match="below 2\\^63"):
            ops.adamw(*lists, **{"step": 1, "lr": 0.1} | wrong)
    with pytest.raises(WeftError, match="z_loss"):
        ops.cross_entropy(logits, targets, z_loss=10**400)


def test_a_nested_weight_is_one_error() -> None:
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(5)])
    with pytest.raises(WeftError, match="nested"):
        ops.linear(torch.ones(2, 3), nested)


def test_strange_calls_are_one_error() -> None:
    _fuzz(2000)


@pytest.mark.exhaustive
def test_many_strange_calls_are_one_error() -> None:
    _fuzz(5000)
