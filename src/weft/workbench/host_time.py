"""What a call costs the host: ``weft.ops`` beside the aten call of the same answer.

    python3 -m weft.workbench.host_time --save results/<device>/host-time.json

At sizes so small that a GPU is done before the host has made the next call. Ways take turns, a
batch of calls each, the device idle before and waited for behind it; what is timed is the host's
clock over the calls alone. The median batch is the figure, microseconds a call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from weft import machine, ops
from weft.core import WeftError, registry
from weft.machine.keep import write_json
from weft.workbench.figures import RESULTS, table
from weft.workbench.report.scales import NONE

RECORD = "host-time.json"
COMMAND = "python3 -m weft.workbench.host_time --save results/<device>/" + RECORD
ROWS, COLUMNS, ROUNDS, CALLS = 64, 1024, 40, 50
WAYS = ("torch", "triton", "cuda")
Call = Callable[[], Any]


def operators(device: str, dtype: torch.dtype) -> dict[str, tuple[Call, Callable[..., Any]]]:
    """By operator: the aten call, and ours as a function of ``impl``; x is (64, 1024)."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    x, square, weight, bias = (
        draw(ROWS, COLUMNS),
        draw(COLUMNS, COLUMNS),
        draw(COLUMNS),
        draw(COLUMNS),
    )
    q, k, v = (draw(1, 8, 128, 64) for _ in range(3))
    ids = torch.randint(0, COLUMNS, (1, ROWS), device=device)
    targets = ids[0]
    last = (COLUMNS,)
    return {
        "gelu": (
            lambda: functional.gelu(x, approximate="tanh"),
            lambda impl: ops.gelu(x, impl=impl),
        ),
        "softmax": (lambda: torch.softmax(x, -1), lambda impl: ops.softmax(x, impl=impl)),
        "layer_norm": (
            lambda: functional.layer_norm(x, last, weight, bias),
            lambda impl: ops.layer_norm(x, weight, bias, impl=impl),
        ),
        "rms_norm": (
            lambda: functional.rms_norm(x, last, weight, 1e-6),
            lambda impl: ops.rms_norm(x, weight, impl=impl),
        ),
        "embedding": (
            lambda: functional.embedding(ids, square),
            lambda impl: ops.embedding(ids, square, impl=impl),
        ),
        "linear": (
            lambda: functional.linear(x, square, bias),
            lambda impl: ops.linear(x, square, bias, impl=impl),
        ),
        "cross_entropy": (
            lambda: functional.cross_entropy(x, targets),
            lambda impl: ops.cross_entropy(x, targets, impl=impl),
        ),
        "attention": (
            lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda impl: ops.attention(q, k, v, causal=True, impl=impl),
        ),
    }


def run(device: str, rounds: int = ROUNDS, calls: int = CALLS) -> dict[str, Any]:
    """Every operator by every way that runs here, as a record: medians in microseconds."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    wait = torch.cuda.synchronize if device == "cuda" else _nothing
    found: dict[str, dict[str, float]] = {}
    for name, (aten, ours) in operators(device, dtype).items():
        ways: dict[str, Call] = {"aten": aten, "dispatched": partial(ours, None)}
        # Without a GPU kernels of ours run in an interpreter, whose time is nobody's.
        there = registry.implementation_names(name) if device == "cuda" else ("torch",)
        ways |= {w: partial(ours, w) for w in WAYS if w in there and _runs(ours, w)}
        found[name] = _turns(ways, wait, rounds, calls)
    size = {"rows": ROWS, "columns": COLUMNS, "dtype": str(dtype).removeprefix("torch.")}
    return {"format": 1, "machine": machine.fingerprint(device), **size, "us": found}


def _runs(ours: Callable[..., Any], way: str) -> bool:
    try:
        ours(way)
    except WeftError:  # not here: a record has no figure for it
        return False
    return True


def _turns(ways: dict[str, Call], wait: Call, rounds: int, calls: int) -> dict[str, float]:
    for call in ways.values():
        for _ in range(calls):
            call()
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for _ in range(rounds):
            for name, call in ways.items():
                wait()
                start = time.perf_counter_ns()
                for _ in range(calls):
                    call()
                times[name].append((time.perf_counter_ns() - start) / calls / 1e3)
    wait()
    return {name: round(statistics.median(t), 2) for name, t in times.items()}


def _nothing() -> None:
    """A CPU has answered when the call returns."""


def figures(results: Path = RESULTS) -> str:
    """Every committed record as Markdown; what to run where there is none."""
    found = [json.loads(f.read_text()) for f in sorted(results.glob(f"*/{RECORD}"))]
    return "\n".join(map(drawn, found)) if found else f"not measured yet: `{COMMAND}`\n"


def drawn(record: dict[str, Any]) -> str:
    """One record: microseconds of the host by operator and way, beside what is above aten's."""
    here = record["machine"]
    changed = " with uncommitted changes" if here["dirty"] else ""
    head = (
        f"**{here['device']}**, {here['date'][:10]}, commit {str(here['commit'])[:10]}{changed}, "
        f"torch {here['versions']['torch']}: {record['dtype']}, microseconds of the host a call.\n"
    )
    return (
        f"{head}\n{table(('operator', 'aten', 'dispatched', 'above', *WAYS), _rows(record), ' ')}"
    )


def _rows(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, us in record["us"].items():
        above = us["dispatched"] - us["aten"]
        ways = (f"{us[w]:.1f}" if w in us else NONE for w in WAYS)
        yield (name, f"{us['aten']:.1f}", f"{us['dispatched']:.1f}", f"{above:+.1f}", *ways)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 where the call was wrong."""
    parser = argparse.ArgumentParser(
        prog="python3 -m weft.workbench.host_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="batches of each way")
    parser.add_argument("--save", type=Path, metavar="FILE", help="where the record goes")
    given = parser.parse_args(arguments)
    try:
        record = run(machine.known_kind(given.device), given.rounds)
        if given.save:
            write_json(given.save, record, what="the record", hint="name another file: --save")
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(drawn(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
