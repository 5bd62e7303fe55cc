"""Host time of a call: ``weft.ops`` beside the aten call with the same result.

    python3 -m weft.lab.host_time --save results/<device>/host-time.json

The sizes are so small that a GPU finishes before the host makes the next call. The implementations
alternate, one batch of calls each; the device is idle before each batch, and the time is the host's
clock over the calls alone. The result is the median over the batches, in microseconds a call.
"""

from __future__ import annotations

import argparse
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
from weft.core.json_files import read_json
from weft.machine.keep import write_json
from weft.workbench.report.markdown import RESULTS, table
from weft.workbench.report.scales import NONE

RECORD = "host-time.json"
COMMAND = "python3 -m weft.lab.host_time --save results/<device>/" + RECORD
ROWS, COLUMNS, ROUNDS, CALLS = 64, 1024, 40, 50
IMPLEMENTATIONS = ("torch", "triton", "cuda")
Call = Callable[[], Any]


def operators(device: str, dtype: torch.dtype) -> dict[str, tuple[Call, Callable[..., Any]]]:
    """Return for each operator the aten call, and Weft's call as a function of ``impl``; x is (64, 1024)."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    x, square, weight, bias = (
        random(ROWS, COLUMNS),
        random(COLUMNS, COLUMNS),
        random(COLUMNS),
        random(COLUMNS),
    )
    q, k, v = (random(1, 8, 128, 64) for _ in range(3))
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
    """Time every operator with every implementation that runs here; return a record of medians in us."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    wait = torch.cuda.synchronize if device == "cuda" else _no_wait
    medians: dict[str, dict[str, float]] = {}
    for name, (aten, ours) in operators(device, dtype).items():
        calls_by_name: dict[str, Call] = {"aten": aten, "dispatched": partial(ours, None)}
        # Without a GPU Weft's kernels run in an interpreter, whose time means nothing.
        names = registry.implementation_names(name) if device == "cuda" else ("torch",)
        calls_by_name |= {
            impl: partial(ours, impl) for impl in IMPLEMENTATIONS if impl in names and _runs(ours, impl)
        }
        medians[name] = _alternate(calls_by_name, wait, rounds, calls)
    size = {"rows": ROWS, "columns": COLUMNS, "dtype": str(dtype).removeprefix("torch.")}
    return {"format": 1, "machine": machine.fingerprint(device), **size, "us": medians}


def _runs(ours: Callable[..., Any], impl: str) -> bool:
    try:
        ours(impl)
    except WeftError:  # not available here: the record has no number for it
        return False
    return True


def _alternate(calls_by_name: dict[str, Call], wait: Call, rounds: int, calls: int) -> dict[str, float]:
    for call in calls_by_name.values():
        for _ in range(calls):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls_by_name}
    with torch.no_grad():
        for _ in range(rounds):
            for name, call in calls_by_name.items():
                wait()
                start = time.perf_counter_ns()
                for _ in range(calls):
                    call()
                times[name].append((time.perf_counter_ns() - start) / calls / 1e3)
    wait()
    return {name: round(statistics.median(t), 2) for name, t in times.items()}


def _no_wait() -> None:
    """Do nothing: a CPU has finished when the call returns."""


def markdown(results: Path = RESULTS) -> str:
    """Return every committed record as Markdown, or the command that measures one."""
    records = [read_json(f) for f in sorted(results.glob(f"*/{RECORD}"))]
    return "\n".join(map(record_table, records)) if records else f"not measured yet: `{COMMAND}`\n"


def record_table(record: dict[str, Any]) -> str:
    """Return one record as Markdown: host microseconds by operator and implementation, and the difference
    of the dispatched call to aten's."""
    fingerprint = record["machine"]
    changed = " with uncommitted changes" if fingerprint["dirty"] else ""
    commit = f"commit {str(fingerprint['commit'])[:10]}{changed}"
    head = (
        f"**{fingerprint['device']}**, {fingerprint['date'][:10]}, {commit}, "
        f"torch {fingerprint['versions']['torch']}: {record['dtype']}, host time in microseconds a call.\n"
    )
    columns = ("operator", "aten", "dispatched", "above", *IMPLEMENTATIONS)
    return f"{head}\n{table(columns, _rows(record), ' ')}"


def _rows(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, us in record["us"].items():
        above = us["dispatched"] - us["aten"]
        cells = (f"{us[impl]:.1f}" if impl in us else NONE for impl in IMPLEMENTATIONS)
        yield (name, f"{us['aten']:.1f}", f"{us['dispatched']:.1f}", f"{above:+.1f}", *cells)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 2 for invalid arguments."""
    parser = argparse.ArgumentParser(
        prog="python3 -m weft.lab.host_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="batches of each implementation")
    parser.add_argument("--save", type=Path, metavar="FILE", help="file for the record")
    options = parser.parse_args(arguments)
    try:
        record = run(machine.known_kind(options.device), options.rounds)
        if options.save:
            write_json(options.save, record, what="the record", hint="name another file: --save")
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(record_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
