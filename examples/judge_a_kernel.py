"""Check and time two GELUs: one that is correct, and one that is wrong only for large inputs.

Nothing needs to be registered: an ``Implementation`` is created here, checked at the operator's cases, and
timed beside torch where it passed.
"""

from __future__ import annotations

import math

import torch

from weft import machine
from weft.core import Implementation, registry
from weft.workbench import bench
from weft.workbench.check.check import check


def sigmoid_form(x: torch.Tensor) -> torch.Tensor:
    """Return x sigmoid(2u), which equals the tanh form and is safe for every x."""
    x32 = x.float()
    u = math.sqrt(2 / math.pi) * (x32 + 0.044715 * x32**3)
    return (x32 * torch.sigmoid(2 * u)).to(x.dtype)


def textbook_form(x: torch.Tensor) -> torch.Tensor:
    """Compute tanh(u) as (e^2u - 1) / (e^2u + 1): inf / inf, which is NaN, above x = 10.07."""
    x32 = x.float()
    e = torch.exp(2 * math.sqrt(2 / math.pi) * (x32 + 0.044715 * x32**3))
    return (0.5 * x32 * (1 + (e - 1) / (e + 1))).to(x.dtype)


def main() -> None:
    device = machine.default_device()
    gelu = registry.operator("gelu")
    mine = [
        Implementation(operator="gelu", name=f.__name__, backend="eager", forward=f)
        for f in (sigmoid_form, textbook_form)
    ]

    print("Is it right?")
    for name in ("fp32-7x129", "fp32-4099-sweep"):
        for implementation in mine:
            verdict = check(gelu, implementation, gelu.case(name), "forward", device, n_seeds=2)
            print(f"  {implementation.name:14} {name:16} {verdict.status}  {verdict.reason}")

    print("How fast is it? Only what passed at the case is timed.")
    records = bench.run([gelu], [*mine, "torch"], ["fp32-4099-sweep"], ["forward"], device, quick=True)
    for record in records:
        text = f"{record.timing.cold:.2f} us" if record.timing else record.verdict.reason
        print(f"  {record.implementation:14} {text}")


if __name__ == "__main__":
    main()
