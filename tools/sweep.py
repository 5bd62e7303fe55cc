"""Time an operator's candidate launch configurations on a GPU, to choose the ones that are shipped.

    PYTHONPATH=src python3 tools/sweep.py softmax sum matmul --out sweep.jsonl

For each (backend, case) every configuration of ``CANDIDATES`` is compared with torch's answer, then
timed with ``triton.testing.do_bench`` (cold L2, median). This chooses; it judges nothing: the
figures that are shown come from ``weft bench``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

CheckRun = tuple[str, str, Any, Callable[[], torch.Tensor], Callable[[], torch.Tensor]]


def gelu() -> Iterator[CheckRun]:
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(16384, 16384, device="cuda", dtype=dtype)
        oracle = partial(torch.nn.functional.gelu, x, approximate="tanh")
        for backend in ("cuda", "triton"):
            loaded = import_module(f"weft.ops.activations.with_{backend}")
            for config in loaded.GELU_CANDIDATES:
                run = partial(loaded.forward_gelu_with, config, x)
                yield backend, f"{dtype} 16384x16384", config, run, oracle


def softmax() -> Iterator[CheckRun]:
    cuda = import_module("weft.ops.softmax.with_cuda")
    by_triton = import_module("weft.ops.softmax.with_triton")
    dtype = torch.bfloat16
    for rows, columns in ((32768, 1024), (32768, 4096), (8192, 16384), (4096, 65536)):
        x = torch.randn(rows, columns, device="cuda", dtype=dtype)
        case, oracle = f"bf16 {rows}x{columns}", partial(torch.softmax, x, -1)
        for config in cuda.candidates(columns, dtype):
            yield "cuda", case, config, _with(cuda, config, x), oracle
        for config in by_triton.candidates(columns, dtype):
            yield "triton", case, config, _with(by_triton, config, x), oracle


def softmax_backward() -> Iterator[CheckRun]:
    cuda = import_module("weft.ops.softmax.with_cuda")
    dtype = torch.bfloat16
    for rows, columns in ((32768, 1024), (32768, 4096), (8192, 16384), (4096, 65536)):
        y = torch.softmax(torch.randn(rows, columns, device="cuda", dtype=dtype), -1)
        g = torch.randn(rows, columns, device="cuda", dtype=dtype)
        case = f"backward bf16 {rows}x{columns}"
        oracle = partial(torch.ops.aten._softmax_backward_data, g, y, -1, dtype)
        for config in cuda.candidates(columns, dtype, is_backward=True):
            yield "cuda", case, config, partial(_first, cuda.backward_with, config, g, y), oracle


def _first(function: Callable[..., tuple[torch.Tensor, ...]], *arguments: Any) -> torch.Tensor:
    return function(*arguments)[0]


def sum() -> Iterator[CheckRun]:
    for dtype, n in ((torch.float32, 1 << 28), (torch.bfloat16, 1 << 28)):
        x = torch.randn(n, device="cuda", dtype=dtype)
        for backend in ("cuda", "triton"):
            loaded = import_module(f"weft.ops.sum.with_{backend}")
            for config in loaded.CANDIDATES:
                yield backend, f"{dtype} {n}", config, _with(loaded, config, x), x.sum


def matmul() -> Iterator[CheckRun]:
    for dtype, size, backends in (
        (torch.bfloat16, 8192, ("triton", "cuda")),
        (torch.float32, 4096, ("cuda", "triton")),
    ):
        a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
        oracle = partial(torch.mm, a, b)
        for backend in backends:
            loaded = import_module(f"weft.ops.matmul.with_{backend}")
            for config in loaded.CANDIDATES(dtype):
                yield backend, f"{dtype} {size}^3", config, _with(loaded, config, a, b), oracle


def _with(loaded: Any, config: Any, *inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: loaded.forward_with(config, *inputs)


def trial(backend: str, case: str, config: Any, run: Callable[[], Any], oracle: Any) -> dict[str, Any]:
    """One configuration's time (us) and its largest difference from torch's answer."""
    import triton

    answer: dict[str, Any] = {"backend": backend, "case": case, "config": str(config)}
    try:
        begun = time.perf_counter()
        got, expected = run().double(), oracle().double()
        answer["first_s"] = round(time.perf_counter() - begun, 2)
        answer["error"] = float((got - expected).abs().max() / expected.pow(2).mean().sqrt())
        answer["us"] = triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median") * 1e3
    except Exception as error:  # noqa: BLE001 - a configuration that does not launch is a finding
        answer["raised"] = f"{type(error).__name__}: {str(error)[:200]}"
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    started = time.monotonic()
    with options.out.open("a") as out:
        for name in options.operators:
            seen: set[str] = set()
            for backend, case, config, run, oracle in globals()[name]():
                if time.monotonic() - started > options.seconds:
                    print("out of time", file=sys.stderr)
                    break
                if case not in seen:
                    seen.add(case)
                    found.append({"op": name, **trial("torch", case, "", oracle, oracle)})
                found.append({"op": name, **trial(backend, case, config, run, oracle)})
                print(json.dumps(found[-1]), file=out, flush=True)
    for row in sorted(found, key=lambda r: (r["op"], r["case"], r.get("us", math.inf))):
        shown = f"{row['us']:9.2f} us  err {row['error']:.1e}" if "us" in row else row["raised"][:90]
        print(f"{row['op']:8} {row['case']:28} {row['backend']:7} {shown}  {row['config'][:110]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
