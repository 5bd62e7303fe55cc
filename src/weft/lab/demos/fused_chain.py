"""Fusion of gelu(layer_norm(residual + dropout(x))): four kernels, a library's fused operator, one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lab.demos import fusion
from weft.lab.demos.chain import COLUMNS, COMPILED, EAGER, FUSED, Chain, Step
from weft.lab.demos.demo import Demo, Variant
from weft.lab.demos.fusion import DROPPED
from weft.lab.demos.traffic import SEED

if TYPE_CHECKING:
    import torch

IMPL = "cuda"  # of Weft's operators


def _eager(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional

    s = residual + functional.dropout(x, DROPPED, training=True)
    return functional.gelu(functional.layer_norm(s, (COLUMNS,), weight, bias), approximate="tanh")


def _fused(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    from weft.ops import dropout_add_layer_norm, gelu

    y, _ = dropout_add_layer_norm(x, residual, weight, bias, p=DROPPED, seed=SEED, impl=IMPL)
    return gelu(y, impl=IMPL)


def _reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    from torch.nn import functional

    s = residual + x * mask / (1 - DROPPED)
    return functional.gelu(functional.layer_norm(s, (COLUMNS,), weight, bias), approximate="tanh")


CHAIN = Chain(
    inputs=("x", "residual", "weight", "bias"),
    steps={
        EAGER: (
            Step("dropout", "x", "d mask"),
            Step("add", "d residual", "s"),
            Step("layer norm", "s weight bias", "y mean rstd"),
            Step("gelu", "y", "z"),
        ),
        COMPILED: (Step("one kernel", "x residual weight bias", "z"),),
        FUSED: (
            Step("dropout_add_layer_norm", "x residual weight bias", "y s"),
            Step("gelu", "y", "z"),
        ),
    },
    calls=fusion.calls(_eager, _fused),
    reference=_reference,
    dropout=True,
)

DEMO = Demo(
    name="fused-chain",
    sentence="a fused kernel should write only what is read later: count the accesses of the whole chain",
    source=None,
    listing="\n".join(
        (
            "s = residual + dropout(x, p)                       # eager: four kernels",
            "z = gelu(layer_norm(s, (1024,), weight, bias), approximate='tanh')",
            "",
            "y, s = weft.ops.dropout_add_layer_norm(x, residual, weight, bias, p=p, seed=seed)",
            "z = weft.ops.gelu(y)                               # Weft: two kernels",
        )
    ),
    bad=Variant(kernel="dropout, add, layer norm, gelu", how="torch's four kernels"),
    good=Variant(kernel="dropout_add_layer_norm, gelu", how="Weft's two operators"),
    expected=1.5,
    because=(
        "All kernels are bound by memory. Eager: dropout 2 accesses and a mask of a byte for each float, "
        "add 3, layer norm 2, GELU 2: 9.25. Weft: the fused operator reads 2 and writes 2, since a "
        "transformer's next block needs the sum s too, and GELU 2: 6. 9.25 / 6 is 1.54."
    ),
    at_least=1.25,
    see=(
        "torch.compile should need 3 accesses: it sees that s is not used later, and draws the dropout's "
        "numbers in the kernel. Weft's operator writes s, which is only needed in a transformer, and has no "
        "GELU: an operator of a library fuses what its author expected."
    ),
    facts=lambda arch: fusion.facts(CHAIN),
    clock=fusion.CLOCK,
    measure=lambda log: fusion.measure(CHAIN, log),
    chain=CHAIN,
    tolerance=CHAIN.tolerance,
)
