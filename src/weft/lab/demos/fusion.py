"""Fusion: a chain of operators in several implementations, verified and timed.

Each implementation is a list of kernels, and each kernel has tensors that it reads and writes once: their
sizes are the predicted bytes (chain.py). traffic.py counts the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from weft.core.log import Log
from weft.lab.demos.chain import COMPILED, EAGER, FUSED, ROWS, Chain, tensor_bytes
from weft.lab.demos.demo import ARITHMETIC, Fact, Measurement
from weft.lab.demos.traffic import SEED, SIDE_OF, make_inputs, rows_here

if TYPE_CHECKING:
    import torch

DROPPED = 0.125  # a probability that every implementation represents exactly
ROUNDS, CHUNKS = 30, 16
CLOCK = "device: CUDA events around all kernels of a call; the tensors are far larger than the L2"


def calls(
    eager: Callable[..., torch.Tensor], fused: Callable[..., torch.Tensor]
) -> Callable[[str], Callable[..., torch.Tensor]]:
    """Return the function from an implementation's name to its call; torch.compile's is made of ``eager``."""

    def call(implementation: str) -> Callable[..., torch.Tensor]:
        import torch

        if implementation == COMPILED:
            return torch.compile(eager)
        return {EAGER: eager, FUSED: fused}[implementation]

    return call


def facts(chain: Chain) -> Sequence[Fact]:
    """Return the predicted bytes of eager and of Weft, in tensors of the input's size."""
    eager, fused = (chain.nbytes(name) / tensor_bytes("x", ROWS) for name in (EAGER, FUSED))
    label = "memory accesses, in tensors of the input's size"
    return [Fact(label=label, bad=eager, good=fused, source=ARITHMETIC)]


def mismatch(chain: Chain, call: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> str | None:
    """Return why a call's output is not the float64 reference, or None.

    A dropout draws its own random numbers. A second call with the same seed shows them: of a matrix of ones,
    kept elements are above their row's mean and dropped ones below it, so that their outputs differ in sign.
    """
    import torch

    from weft.lab.demos.run import mismatch as difference

    torch.manual_seed(SEED)
    output = call(*inputs)
    mask = None
    if chain.dropout:
        torch.manual_seed(SEED)
        ones = {"x": 1.0, "residual": 0.0, "weight": 1.0, "bias": 0.0}
        mask = call(*(torch.full_like(t, ones[n]) for n, t in zip(chain.inputs, inputs, strict=True))) > 0
        share = 1 - torch.count_nonzero(mask).item() / mask.numel()
        if abs(share - DROPPED) > 6 * math.sqrt(DROPPED * (1 - DROPPED) / mask.numel()):
            return f"it drops {100 * share:.3g} % of the elements, not {100 * DROPPED:g} %"
    rows = inputs[0].shape[0]
    if output.shape != inputs[0].shape:
        return f"its shape is {tuple(output.shape)}, not {tuple(inputs[0].shape)}"
    for chunk in torch.arange(rows, device=output.device).chunk(CHUNKS):
        part = slice(int(chunk[0]), int(chunk[-1]) + 1)
        cut = [t if t.dim() == 1 else t[part] for t in inputs]
        expected = chain.reference(*(t.double() for t in cut), mask=None if mask is None else mask[part])
        if wrong := difference(output[part], expected, chain.tolerance):
            return wrong
    return None


def measure(chain: Chain, log: Log) -> Mapping[str, Measurement]:
    """Verify every implementation, then time all of them, interleaved."""
    from weft.lab.demos.run import event_timer, interleaved

    inputs = make_inputs(chain, rows_here())
    calls = {SIDE_OF[name]: chain.calls(name) for name in chain.steps}
    for side, call in calls.items():
        if wrong := mismatch(chain, call, inputs):
            return {side: Measurement(wrong=f"{side}: {wrong}")}
    log("all outputs are correct; timing")
    timer = event_timer()
    samples = interleaved(list(calls), lambda side: timer(lambda: calls[side](*inputs)), ROUNDS)
    return {side: Measurement(samples=tuple(us)) for side, us in samples.items()}
