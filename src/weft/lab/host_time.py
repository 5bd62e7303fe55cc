"""Host time of a call: ``weft.ops`` beside the aten call with the same result.

    python3 -m weft.lab.host_time --save results/<device>/host-time.json

The sizes are so small that a GPU finishes before the host makes the next call. The implementations
alternate, one batch of calls each; the device is idle before each batch, and the time is the host's
clock over the calls alone. The result is the median over the batches, in microseconds a call.

Calls are timed without a gradient, and with one: then each call is followed by ``backward(grad)`` of its
output, after which the inputs' gradients are dropped, and both have a time of their own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from weft.workbench.tuning.audit_points import AuditPoint, workload

RECORD = "host-time.json"
COMMAND = "python3 -m weft.lab.host_time --save results/<device>/" + RECORD
ROWS, COLUMNS, ROUNDS, CALLS = 64, 1024, 40, 50
IMPLEMENTATIONS = ("torch", "triton", "cuda")
# Operators whose calls are those of the audit.
AUDITED = (
    "relu",
    "bias_gelu",
    "swiglu",
    "geglu",
    "add_layer_norm",
    "add_rms_norm",
    "rope",
    "matmul",
    "linear_residual",
)
Call = Callable[[], Any]


@dataclass(frozen=True)
class Calls:
    """One operator: the aten call, Weft's as a function of ``impl``, and the inputs that take a gradient."""

    aten: Call
    ours: Callable[[str | None], Any]
    leaves: tuple[torch.Tensor, ...]


def operators(device: str, dtype: torch.dtype) -> dict[str, Calls]:
    """Return the calls of each operator; x is (64, 1024)."""

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    x, square, weight, bias = leaf(ROWS, COLUMNS), leaf(COLUMNS, COLUMNS), leaf(COLUMNS), leaf(COLUMNS)
    q, k, v = (leaf(1, 8, 128, 64) for _ in range(3))
    ids = torch.randint(0, COLUMNS, (1, ROWS), device=device)
    targets = ids[0]
    last = (COLUMNS,)
    return {
        "gelu": Calls(
            lambda: functional.gelu(x, approximate="tanh"), lambda impl: ops.gelu(x, impl=impl), (x,)
        ),
        "softmax": Calls(lambda: torch.softmax(x, -1), lambda impl: ops.softmax(x, impl=impl), (x,)),
        "layer_norm": Calls(
            lambda: functional.layer_norm(x, last, weight, bias),
            lambda impl: ops.layer_norm(x, weight, bias, impl=impl),
            (x, weight, bias),
        ),
        "rms_norm": Calls(
            lambda: functional.rms_norm(x, last, weight, 1e-6),
            lambda impl: ops.rms_norm(x, weight, impl=impl),
            (x, weight),
        ),
        "embedding": Calls(
            lambda: functional.embedding(ids, square),
            lambda impl: ops.embedding(ids, square, impl=impl),
            (square,),
        ),
        "linear": Calls(
            lambda: functional.linear(x, square, bias),
            lambda impl: ops.linear(x, square, bias, impl=impl),
            (x, square, bias),
        ),
        "linear_gelu": Calls(
            lambda: functional.gelu(functional.linear(x, square, bias), approximate="tanh"),
            lambda impl: ops.linear_gelu(x, square, bias, impl=impl),
            (x, square, bias),
        ),
        "cross_entropy": Calls(
            lambda: functional.cross_entropy(x, targets),
            lambda impl: ops.cross_entropy(x, targets, impl=impl),
            (x,),
        ),
        "attention": Calls(
            lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda impl: ops.attention(q, k, v, causal=True, impl=impl),
            (q, k, v),
        ),
    } | {name: _of_audit(name, device, dtype) for name in AUDITED}


def _of_audit(name: str, device: str, dtype: torch.dtype) -> Calls:
    """Return the calls of an operator as the audit compares them (workbench/tuning/audit_points.py)."""
    sizes = {"rows": ROWS, "columns": COLUMNS}
    if name in ("matmul", "linear_residual"):
        sizes = {"M": ROWS, "N": COLUMNS, "K": COLUMNS}
    elif name == "rope":
        sizes = {"batch": 1, "heads": 8, "queries": 128, "head_dim": 64}
    short = str(dtype).removeprefix("torch.")
    point = AuditPoint(
        operator=name, model="", sizes=tuple(sizes.items()), dtype=short, training=True, captured=False
    )
    work = workload(point)
    inputs = [
        torch.randn(a.shape, device=device, dtype=torch.float32 if a.is_table else dtype)
        for a in work.arguments
    ]
    takes_gradient = [not a.is_table for a in work.arguments]
    leaves = tuple(x.requires_grad_() for x, takes in zip(inputs, takes_gradient, strict=True) if takes)
    return Calls(
        lambda: _one_of(work.torchs(*inputs)), lambda impl: _one_of(work.ours(*inputs, impl=impl)), leaves
    )


def _one_of(outputs: Any) -> torch.Tensor:
    """Return the output, or the sum of two where a gradient is wanted: a model uses a norm's sum too."""
    if isinstance(outputs, tuple):
        return outputs[0] + outputs[1] if torch.is_grad_enabled() else outputs[0]
    return outputs  # type: ignore[no-any-return]


def run(
    device: str,
    rounds: int = ROUNDS,
    calls: int = CALLS,
    names: Sequence[str] | None = None,
    dtype_name: str | None = None,
) -> dict[str, Any]:
    """Time operators (all, or those of ``names``) with every implementation that runs here.

    ``dtype_name``: bfloat16 on a GPU and float32 on a CPU if None. Returns a record of medians in us: ``us``
    without a gradient, ``forward_us`` and ``backward_us`` with one.
    """
    dtype = getattr(torch, dtype_name or ("bfloat16" if device == "cuda" else "float32"))
    wait = torch.cuda.synchronize if device == "cuda" else _no_wait
    medians: dict[str, dict[str, dict[str, float]]] = {"us": {}, "forward_us": {}, "backward_us": {}}
    for name, operator in operators(device, dtype).items():
        if names and name not in names:
            continue
        by_name: dict[str, Call] = {"aten": operator.aten, "dispatched": partial(operator.ours, None)}
        # Without a GPU Weft's kernels run in an interpreter, whose time means nothing.
        impls = registry.implementation_names(name) if device == "cuda" else ("torch",)
        by_name |= {impl: partial(operator.ours, impl) for impl in IMPLEMENTATIONS if impl in impls}
        by_name = {label: call for label, call in by_name.items() if _runs(call, operator.leaves)}
        medians["us"][name] = _without_gradient(by_name, wait, rounds, calls)
        forward, backward = _with_gradient(by_name, operator.leaves, wait, rounds, calls)
        medians["forward_us"][name], medians["backward_us"][name] = forward, backward
    size = {"rows": ROWS, "columns": COLUMNS, "dtype": str(dtype).removeprefix("torch.")}
    return {"format": 2, "machine": machine.fingerprint(device), **size, **medians}


def _runs(call: Call, leaves: Iterable[torch.Tensor]) -> bool:
    try:
        _call_with_gradient(call, leaves)
    except WeftError:  # not available here: the record has no number for it
        return False
    return True


def _call_with_gradient(call: Call, leaves: Iterable[torch.Tensor]) -> None:
    y = call()
    y.backward(torch.ones_like(y))
    for x in leaves:
        x.grad = None


@torch.no_grad()
def _without_gradient(
    calls_by_name: dict[str, Call], wait: Call, rounds: int, calls: int
) -> dict[str, float]:
    """Return the medians of calls that want no gradient."""
    for call in calls_by_name.values():
        for _ in range(calls):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls_by_name}
    for _ in range(rounds):
        for name, call in calls_by_name.items():
            wait()
            start = time.perf_counter_ns()
            for _ in range(calls):
                call()
            times[name].append((time.perf_counter_ns() - start) / calls / 1e3)
    wait()
    return _medians(times)


def _with_gradient(
    calls_by_name: dict[str, Call],
    leaves: tuple[torch.Tensor, ...],
    wait: Call,
    rounds: int,
    calls: int,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the medians of calls that want a gradient, and of the backwards that follow each of them."""
    grads = {name: torch.ones_like(call()) for name, call in calls_by_name.items()}
    for call in calls_by_name.values():
        for _ in range(calls):
            _call_with_gradient(call, leaves)
    forward: dict[str, list[float]] = {name: [] for name in calls_by_name}
    backward: dict[str, list[float]] = {name: [] for name in calls_by_name}
    clock = time.perf_counter_ns
    for _ in range(rounds):
        for name, call in calls_by_name.items():
            grad, forward_ns, backward_ns = grads[name], 0, 0
            wait()
            for _ in range(calls):
                start = clock()
                y = call()
                middle = clock()
                y.backward(grad)
                end = clock()
                forward_ns += middle - start
                backward_ns += end - middle
                for x in leaves:
                    x.grad = None
            forward[name].append(forward_ns / calls / 1e3)
            backward[name].append(backward_ns / calls / 1e3)
    wait()
    return _medians(forward), _medians(backward)


def _medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(t), 2) for name, t in times.items()}


def _no_wait() -> None:
    """Do nothing: a CPU has finished when the call returns."""


def markdown(results: Path = RESULTS) -> str:
    """Return every committed record as Markdown, or the command that measures one."""
    records = [read_json(f) for f in sorted(results.glob(f"*/{RECORD}"))]
    return "\n".join(map(record_table, records)) if records else f"not measured yet: `{COMMAND}`\n"


def record_table(record: dict[str, Any]) -> str:
    """Return one record as Markdown: host microseconds by operator and implementation.

    The first table has calls without a gradient, and the difference of the dispatched call to aten's. The
    second has forward and backward of calls with a gradient, also as multiples of aten's time. Records of
    format 1 have no second table.
    """
    fingerprint = record["machine"]
    changed = " with uncommitted changes" if fingerprint["dirty"] else ""
    commit = f"commit {str(fingerprint['commit'])[:10]}{changed}"
    head = (
        f"**{fingerprint['device']}**, {fingerprint['date'][:10]}, {commit}, "
        f"torch {fingerprint['versions']['torch']}: {record['dtype']}, host time in microseconds a call.\n"
    )
    columns = ("operator", "aten", "dispatched", "above", *IMPLEMENTATIONS)
    text = f"{head}\n{table(columns, _rows(record), ' ')}"
    if "forward_us" not in record:
        return text
    columns = ("operator", "direction", "aten", "dispatched", *IMPLEMENTATIONS)
    gradients = table(columns, _gradient_rows(record), " ")
    return f"{text}\nWith a gradient, also as a multiple of aten:\n\n{gradients}"


def _rows(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, us in record["us"].items():
        above = us["dispatched"] - us["aten"]
        cells = (f"{us[impl]:.1f}" if impl in us else NONE for impl in IMPLEMENTATIONS)
        yield (name, f"{us['aten']:.1f}", f"{us['dispatched']:.1f}", f"{above:+.1f}", *cells)


def _gradient_rows(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name in record["forward_us"]:
        for direction in ("forward", "backward"):
            us = record[f"{direction}_us"][name]
            cells = (
                f"{us[impl]:.1f} ({us[impl] / us['aten']:.1f}×)" if impl in us else NONE
                for impl in ("dispatched", *IMPLEMENTATIONS)
            )
            yield (name, direction, f"{us['aten']:.1f}", *cells)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 2 for invalid arguments."""
    parser = argparse.ArgumentParser(
        prog="python3 -m weft.lab.host_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument("names", nargs="*", metavar="OPERATOR", help="default: all of them")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on a GPU")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="batches of each implementation")
    parser.add_argument("--calls", type=int, default=CALLS, help="calls in a batch")
    parser.add_argument("--save", type=Path, metavar="FILE", help="file for the record")
    options = parser.parse_args(arguments)
    try:
        kind = machine.known_kind(options.device)
        record = run(kind, options.rounds, options.calls, options.names, options.dtype)
        if options.save:
            write_json(options.save, record, what="the record", hint="name another file: --save")
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(record_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
