"""Time the bare AdamW step in place, without the copies that the workbench makes: GPU only.

    python tools/adamw_step.py

GPT-2's 148 parameters and one flat one of as many elements, float32; torch's fused, its default,
and Weft's. Reports the share of the measured copy bandwidth, at 28 bytes of an element (32 clipped), and
the host's time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from weft import ops
from weft.workbench.timing.ceilings import ceilings

WIDTH, LAYERS, VOCABULARY, CONTEXT = 768, 12, 50257, 1024
NUMBERS = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def shapes() -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of GPT-2 124M."""
    w = WIDTH
    block = [(w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,), (w,), (w,), (4 * w, w), (4 * w,)]
    block += [(w, 4 * w), (w,)]
    return [(VOCABULARY, w), (CONTEXT, w), *(s for _ in range(LAYERS) for s in block), (w,), (w,)]


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Return the median microseconds of a step by CUDA events, and of its host time."""
    for _ in range(5):
        step()
    device, host = [], []
    for _ in range(50):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000)  # all launches are queued before the first kernel starts
        start.record()
        began = time.perf_counter()
        step()
        host.append((time.perf_counter() - began) * 1e6)
        end.record()
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end) * 1e3)
    return statistics.median(device), statistics.median(host)


def candidates(params: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    for p in params:
        p.grad = torch.randn_like(p)
    grads = [p.grad for p in params if p.grad is not None]
    steps: dict[str, Callable[[], object]] = {}
    for name, fused in (("torch fused", True), ("torch default", None)):
        optimizer = torch.optim.AdamW(params, fused=fused, **NUMBERS)  # type: ignore[arg-type]
        steps[name] = optimizer.step
    m, v = ([torch.zeros_like(p) for p in params] for _ in "mv")
    data = [p.detach() for p in params]
    for impl in ("triton", "cuda"):
        for suffix, bound in (("", None), (", clipped", 1.0)):

            def step(impl: str = impl, bound: float | None = bound) -> None:
                ops.adamw(data, grads, m, v, step=10, max_norm=bound, impl=impl, **NUMBERS)  # type: ignore[arg-type]

            steps[impl + suffix] = step
    return steps


def main() -> None:
    measured = ceilings("cuda")
    assert measured is not None
    for title, sizes in (("148 parameters", shapes()), ("one parameter", [(124_439_808,)])):
        params = [torch.randn(s, device="cuda", requires_grad=True) for s in sizes]
        count = sum(p.numel() for p in params)
        print(f"{title}, {count / 1e6:.1f} M elements, copy {measured.copy / 1e12:.2f} TB/s")
        for name, step in candidates(params).items():
            us, host = timed(step)
            nbytes = count * (32 if "clipped" in name else 28)
            share = nbytes / (us * 1e-6) / measured.copy
            print(f"  {name:18} {us:8.1f} us  {share:6.1%} of copy  host {host:7.1f} us")


if __name__ == "__main__":
    main()
