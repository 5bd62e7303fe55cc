"""AdamW over lists, as an optimizer calls it; conformance tests single parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from weft import WeftError, ops
from weft.core import registry
from weft.ops.adamw.with_torch import supports

Lists = list[list[torch.Tensor]]
SIZES = ((7, 9), (0,), (), (3, 5, 7))
USUAL: dict[str, Any] = {"lr": 3e-2, "weight_decay": 0.1, "eps": 1e-8, "betas": (0.9, 0.999)}


def _lists(dtype: torch.dtype = torch.float32, state: torch.dtype | None = None) -> Lists:
    torch.manual_seed(0)
    params = [torch.randn(s).to(dtype) for s in SIZES]
    grads = [torch.randn(s).to(dtype) for s in SIZES]
    params[0] = params[0].t().contiguous().t()  # dense, but with other strides than its gradient
    return [params, grads, *([torch.zeros(s, dtype=state or dtype) for s in SIZES] for _ in "mv")]


def _train(impls: list[str], steps: int) -> tuple[list[Lists], list[torch.Tensor]]:
    """Return results of Weft's AdamW in float32 and of torch's in float64 on the same clipped gradients."""
    ours = [_lists() for _ in impls]
    exact = [p.double() for p in ours[0][0]]
    optimizer = torch.optim.AdamW([p.requires_grad_() for p in exact], foreach=True, **USUAL)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        for i, leaf in enumerate(exact):
            ours[0][1][i].normal_(generator=generator)
            leaf.grad = ours[0][1][i].double()
        torch.nn.utils.clip_grad_norm_(exact, 1.0)
        optimizer.step()
        counted = torch.tensor(float(step)) if step % 2 else step
        for impl, lists in zip(impls, ours, strict=True):
            ops.adamw(lists[0], ours[0][1], *lists[2:], step=counted, max_norm=1.0, impl=impl,
                      **USUAL)  # fmt: skip
    return ours, [p.detach() for p in exact]


@pytest.mark.parametrize(("impl", "steps"), [("eager", 1000), ("triton", 4)])
def test_matches_torch_over_many_steps(impl: str, steps: int) -> None:
    """The error against float64 is at most twice that of torch in float32."""
    (ours, torchs), exact = _train([impl, "torch"], steps)
    for p, by_torch, want in zip(ours[0], torchs[0], exact, strict=True):
        if p.numel():
            size = float(want.square().mean().sqrt())
            off = float((p - want).abs().max())
            allowed = 2 * float((by_torch - want).abs().max()) + 2 * 2**-23 * size
            assert off <= allowed


def test_stochastic_rounding_accumulates_small_steps() -> None:
    """A hundred steps of 1/40 of a bfloat16 unit each: rounding to nearest changes nothing."""
    moved = {}
    for rounding in ("nearest", "stochastic"):
        p, g = [torch.ones(512, dtype=torch.bfloat16)], [torch.ones(512, dtype=torch.bfloat16)]
        m, v = [torch.ones(512)], [torch.ones(512)]
        for step in range(1000, 1100):
            ops.adamw(p, g, m, v, lr=1e-4, weight_decay=0.0, step=step, rounding=rounding,
                      seed=step, impl="eager")  # fmt: skip
        moved[rounding] = 1.0 - float(p[0].float().mean())
    assert moved["nearest"] == 0.0
    assert moved["stochastic"] == pytest.approx(0.01 * (1 - 0.999**1050) ** 0.5, rel=0.25)


def test_masters_hold_the_low_bits_of_half_precision() -> None:
    lists = _lists(torch.float16, torch.float32)
    masters = [p.float() for p in lists[0]]
    exact = [m.clone() for m in masters]
    state = _lists()[2:]
    for step in (1, 2):
        ops.adamw(*lists, step=step, masters=masters, impl="triton", **USUAL)
        grads = [g.float() for g in lists[1]]
        ops.adamw(exact, grads, *state, step=step, impl="eager", **USUAL)
    for p, master, want in zip(lists[0], masters, exact, strict=True):
        torch.testing.assert_close(master, want, rtol=1e-6, atol=1e-7)
        assert torch.equal(p, master.half())


def test_compiles_without_graph_breaks() -> None:
    ours, theirs = _lists(), _lists()

    def step(*lists: list[torch.Tensor]) -> torch.Tensor:
        ops.adamw(*lists, step=3, max_norm=1.0, **USUAL)
        return lists[0][0] * 2

    torch._dynamo.reset()
    twice = torch.compile(step, fullgraph=True, backend="aot_eager")(*ours)
    assert torch.equal(twice, step(*theirs))
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


ONE = torch.ones(3)
BAD: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((ONE, [ONE], [ONE], [ONE]), {}, "a list of tensors"),
    (([ONE], [], [ONE], [ONE]), {}, "1, one for each parameter"),
    (([ONE], [None], [ONE], [ONE]), {}, "a tensor"),
    (([ONE], [torch.ones(4)], [ONE], [ONE]), {}, r"grads\[0\].shape"),
    (([ONE], [ONE.half()], [ONE], [ONE]), {}, r"grads\[0\].dtype"),
    (([ONE], [ONE.to("meta")], [ONE], [ONE]), {}, "device"),
    (([ONE], [ONE], [ONE], [ONE]), {"step": 0}, "counts from 1"),
    (([ONE], [ONE], [ONE], [ONE]), {"lr": -1.0}, "lr"),
    (([ONE], [ONE], [ONE], [ONE]), {"max_norm": 0.0}, "above 0, or None"),
    (([ONE], [ONE], [ONE], [ONE]), {"rounding": "stochastic"}, "bfloat16 parameters"),
    (([ONE], [ONE], [ONE], [ONE]), {"impl": "tritn"}, "unknown implementation"),
    (([ONE], [ONE], [ONE], [ONE]), {"impl": "cuda"}, "is not available"),
    (([ONE], [ONE], [ONE], [ONE]), {"masters": [ONE], "impl": "torch"}, "float32 master"),
]


@pytest.mark.parametrize(("lists", "more", "message"), BAD, ids=lambda v: None)
def test_invalid_calls_raise_one_clear_error(
    lists: tuple[Any, ...], more: dict[str, Any], message: str
) -> None:
    if more.get("impl") == "cuda" and torch.cuda.is_available():
        lists = tuple([x.cpu() for x in each] for each in lists)
    with pytest.raises(WeftError, match=message):
        ops.adamw(*lists, **{"step": 1, **more})
    assert float(ONE.sum()) == 3.0


def test_support_is_decided_without_the_numbers() -> None:
    """Torch's fused kernel refuses a large learning rate only if the case has one."""
    case = registry.operator("adamw").case("fp32-4099-first-step")
    assert case.dtype == "float32"
    assert supports(replace(case, params={"rounding": "nearest"}), "cuda")
    assert not supports(replace(case, params={**case.params, "lr": 1.0}), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("impl", [None, "torch", "triton", "cuda"])
def test_gpu_steps_match_the_cpu(impl: str | None) -> None:
    here, there = _lists(), [[t.cuda() for t in x] for x in _lists()]
    ops.adamw(*here, **USUAL, step=1, impl="eager")
    if impl == "torch":  # its fused kernel needs a parameter and its gradient with the same strides
        with pytest.raises(WeftError, match="one layout"):
            ops.adamw(*there, **USUAL, step=1, impl=impl)
        here, there = ([[t.contiguous() for t in x] for x in lists] for lists in (_lists(), there))
        ops.adamw(*here, **USUAL, step=1, impl="eager")
    ops.adamw(*there, **USUAL, step=1, impl=impl)
    for mine, theirs in zip(here, there, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b.cpu(), rtol=1e-5, atol=1e-6)
