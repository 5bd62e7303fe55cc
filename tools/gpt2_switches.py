"""Time of a GPT-2 step as the implementation of one operator at a time is switched.

    python tools/gpt2_switches.py > results/<device>/gpt2-switches.json
    python tools/gpt2_switches.py --table results/<device>/gpt2-switches.json

A step is forward and backward of random tokens, captured as one CUDA graph on a GPU, without the optimizer.
A model with a switch (B) is compared with the one without (A) in the order A B B A: both see the same clock
and temperature on average. Each number is the median of STEPS steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weft import machine
from weft.core import WeftError, json_files, registry
from weft.gpt2.model.config import OPERATORS, ModelConfig, preset
from weft.gpt2.model.model import GPT
from weft.gpt2.report.run_tables import switch_table

STEPS = 20
# Implementations worth a comparison, where the operator has them. Dropout is off.
IMPLEMENTATIONS = ("torch", "triton", "cuda")
SWITCHED = tuple(name for name in OPERATORS if "dropout" not in name)


def step_of(config: ModelConfig, tokens: torch.Tensor) -> Callable[[], None]:
    """Return a function that runs forward and backward of a model of this configuration."""
    dtype = torch.bfloat16 if tokens.is_cuda else torch.float32
    model = GPT(config, device=tokens.device, dtype=dtype)
    targets = tokens.roll(-1, 1)

    def step() -> None:
        for p in model.parameters():
            p.grad = None
        model(tokens, targets).backward()

    if not tokens.is_cuda:
        step()
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and warms the allocator
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def times_ms(step: Callable[[], None], is_cuda: bool, steps: int) -> list[float]:
    """Return the milliseconds of each of so many steps."""
    times = []
    for _ in range(steps):
        if is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def compare(base: ModelConfig, tokens: torch.Tensor, operator: str, impl: str, steps: int) -> dict[str, Any]:
    """Return the median step without and with a switch, or the reason why it does not run."""
    row: dict[str, Any] = {"operator": operator, "implementation": impl}
    try:
        switched = step_of(replace(base, ops={operator: impl}), tokens)
    except (WeftError, ImportError) as error:
        return {**row, "reason": str(error)}
    plain = step_of(base, tokens)
    samples: dict[str, list[float]] = {"base_ms": [], "switched_ms": []}
    a, b = ("base_ms", plain), ("switched_ms", switched)
    for name, step in (a, b, b, a):
        samples[name] += times_ms(step, tokens.is_cuda, steps)
    return {**row, **{name: statistics.median(values) for name, values in samples.items()}}


def measure(name: str, batch: int, steps: int, operators: tuple[str, ...]) -> dict[str, Any]:
    """Return the record of a preset: each operator with each implementation that the default is not."""
    base = preset(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    shape = (batch, base.block_size)
    tokens = torch.randint(base.vocab_size, shape, generator=generator).to(device)
    chosen = dict(base.implementations()[tokens.is_cuda])
    chosen["mlp_gelu"] = chosen["mlp_gelu"] or "linear_gelu"  # which takes its place with the layer after it
    rows = []
    for operator in operators:
        known = registry.implementation_names(operator)
        for impl in IMPLEMENTATIONS:
            if impl in known and impl != chosen[operator]:
                rows.append(compare(base, tokens, operator, impl, steps))
                print(rows[-1], file=sys.stderr)
    return {"preset": name, "batch": batch, "length": base.block_size, "rows": rows, "chosen": chosen,
            "machine": machine.fingerprint()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="124M")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step")
    parser.add_argument("--table", type=Path, help="print the table of a record instead")
    options = parser.parse_args()
    if options.table:
        print(switch_table(json_files.read_json(options.table)))
    else:
        print(json.dumps(measure(options.preset, options.batch, STEPS, SWITCHED)))


if __name__ == "__main__":
    main()
