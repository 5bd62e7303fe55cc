"""Fusion of gelu(x + bias): the sum between the two kernels is written to memory and read again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lab.demos import fusion
from weft.lab.demos.chain import COMPILED, EAGER, FUSED, Chain, Step
from weft.lab.demos.demo import Demo, Variant

if TYPE_CHECKING:
    import torch

IMPL = "cuda"  # of Weft's operator
ONE_KERNEL = (Step("bias_gelu", "x bias", "y"),)


def _eager(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import gelu

    return gelu(x + bias, approximate="tanh")


def _fused(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    from weft.ops import bias_gelu

    return bias_gelu(x, bias, impl=IMPL)


CHAIN = Chain(
    inputs=("x", "bias"),
    steps={
        EAGER: (Step("add", "x bias", "t"), Step("gelu", "t", "y")),
        COMPILED: ONE_KERNEL,
        FUSED: ONE_KERNEL,
    },
    calls=fusion.calls(_eager, _fused),
    reference=lambda x, bias, mask: _eager(x, bias),
)

DEMO = Demo(
    name="fused-gelu",
    sentence="a chain of elementwise operators should be one kernel, so that nothing between them moves",
    source=None,
    listing="\n".join(
        (
            "y = torch.nn.functional.gelu(x + bias, approximate='tanh')  # eager: two kernels",
            "y = torch.compile(lambda x, bias: gelu(x + bias, approximate='tanh'))(x, bias)",
            "y = weft.ops.bias_gelu(x, bias)",
        )
    ),
    bad=Variant(kernel="add, gelu", how="torch's two kernels"),
    good=Variant(kernel="bias_gelu", how="Weft's operator, one kernel"),
    expected=2.0,
    because=(
        "Both kernels are bound by memory. Eager reads x, writes t = x + bias, reads t and writes y: 4 "
        "accesses. Fused, t stays in registers: 2 accesses. The bias is small and comes from a cache."
    ),
    at_least=1.5,
    see=(
        "Compare the counted bytes with the predicted ones: the time follows the bytes. torch.compile fuses "
        "such a chain by itself."
    ),
    facts=lambda arch: fusion.facts(CHAIN),
    clock=fusion.CLOCK,
    measure=lambda log: fusion.measure(CHAIN, log),
    chain=CHAIN,
    tolerance=CHAIN.tolerance,
)
