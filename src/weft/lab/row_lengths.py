"""Efficiency of softmax and the norms against the length and the alignment of a row.

    python3 -m weft.lab.row_lengths --save results/<device>/row-lengths.json
    python3 -m weft.lab.row_lengths --operators layer_norm rms_norm --directions backward --impl cuda

Each point moves at least 64 MB, more than an L2 holds. The efficiency is the share of copying: the bytes that
the operator must move, over the measured bandwidth of copying, over the time. A delay on the device comes
before the calls, so that the host's time does not count. The result of a point is the median of several
rounds, in which the implementations alternate. A point is timed only if its first rows, and the gradients of
weight and bias, agree with torch's.
Rows that are not whole vectors of 16 bytes, or do not begin at one, count as not aligned.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft import machine
from weft.core import WeftError, registry
from weft.core.json_files import read_json
from weft.machine.keep import write_json
from weft.workbench.report.markdown import RESULTS, table
from weft.workbench.report.scales import NONE
from weft.workbench.report.svg_curves import Curve, render_curves
from weft.workbench.timing.ceilings import ceilings

RECORD = "row-lengths.json"
COMMAND = "python3 -m weft.lab.row_lengths --save results/<device>/" + RECORD
OPERATORS = ("softmax", "layer_norm", "rms_norm")
DIRECTIONS = ("forward", "backward")
IMPLEMENTATIONS = ("cuda", "triton", "torch")
LENGTHS = (
    64, 65, 128, 200, 320, 321, 513, 768, 1001, 1024, 2048, 2049, 4096, 4097, 5120, 8192, 8191, 16384, 16385,
    32768, 32769, 50257, 50264, 65536, 65537, 131072, 131073, 262144, 262143,
)  # fmt: skip
# Lengths at which the inputs are measured once more from an address 2 bytes behind a multiple of 16.
SHIFTED_LENGTHS = (64, 320, 1024, 4096, 16384, 65536, 262144)
ELEMENTS = 1 << 26  # of one tensor: 134 MB in bfloat16
CALLS, ROUNDS = 10, 5
DELAY_CYCLES = 12_000_000  # about 7 ms, in which the host issues all calls of a round
AGREEMENT = 0.03  # of the scale of an element: several roundings to bfloat16
EPS = 1e-5
Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The part of the grid that is measured; ``columns`` None is every row length."""

    operators: Sequence[str] = OPERATORS
    directions: Sequence[str] = DIRECTIONS
    implementations: Sequence[str] = IMPLEMENTATIONS
    columns: Sequence[int] | None = None

    def points(self) -> list[tuple[int, int]]:
        """Return each row length with the elements between a multiple of 16 bytes and the inputs."""
        grid = [(n, 0) for n in LENGTHS] + [(n, 1) for n in SHIFTED_LENGTHS]
        return [point for point in grid if self.columns is None or point[0] in self.columns]


def is_aligned(columns: int, offset: int) -> bool:
    """Return True if every row of 2-byte elements is a whole number of aligned vectors of 16 bytes."""
    return columns % 8 == 0 and offset == 0


def _rows(columns: int, offset: int, device: str, elements: int) -> torch.Tensor:
    rows = max(1, elements // columns)
    flat = torch.randn(rows * columns + offset, device=device).to(torch.bfloat16)
    return flat[offset:].view(rows, columns)


def calls_at(operator: str, direction: str, columns: int, offset: int, **options: Any) -> dict[str, Call]:
    """Return a call of each implementation at one point; ``options`` are the device and the elements."""
    x = _rows(columns, offset, **options)
    vectors = [torch.randn(columns, device=x.device).to(x.dtype) for _ in range(2)]
    weights = {"softmax": [], "layer_norm": vectors, "rms_norm": vectors[:1]}[operator]
    params: dict[str, Any] = {} if operator == "softmax" else {"eps": EPS}
    grad = _rows(columns, offset, **options) if direction == "backward" else None
    calls: dict[str, Call] = {}
    for name in IMPLEMENTATIONS:
        implementation = registry.implementation(operator, name)
        forward, backward = implementation.forward, implementation.backward
        if grad is None:
            calls[name] = partial(forward, x, *weights, **params)
        elif backward is None:
            leaves = [t.detach().requires_grad_() for t in (x, *weights)]
            y = forward(*leaves, **params)
            calls[name] = partial(torch.autograd.grad, y, leaves, grad, retain_graph=True)
        else:
            saved = (torch.softmax(x, -1),) if operator == "softmax" else (x, weights[0])
            calls[name] = partial(backward, grad, *saved, **params)
    return calls


def _sample(output: Any) -> list[torch.Tensor]:
    """Return the first eight rows of each output, and the whole gradients of weight and bias, in float32."""
    outputs = (output,) if isinstance(output, torch.Tensor) else output
    return [t[:8].float() if t.dim() > 1 else t.float() for t in outputs]


def _agrees(output: Any, expected: list[torch.Tensor]) -> bool:
    return all(_is_close(a, e) for a, e in zip(_sample(output), expected, strict=True))


def _is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    # An element's own size counts too: the largest gradients of a softmax are a hundred times the mean.
    scale = expected.square().mean().sqrt().clamp_min(1e-30) * 8 + expected.abs()
    return bool(((actual - expected).abs() <= AGREEMENT * scale).all())


def time_calls(calls: dict[str, Call], names: Sequence[str] = IMPLEMENTATIONS) -> dict[str, float]:
    """Return the median device time of a call in us, by implementation in ``names``.

    A call that raises has no time.
    """
    expected = _sample(calls["torch"]())
    running = {}
    for name, call in calls.items():
        if name not in names:
            continue
        try:
            if not _agrees(call(), expected):
                raise WeftError(f"{name} disagrees with torch: nothing is timed", hint="weft check")
        except (WeftError, torch.OutOfMemoryError) as error:
            print(f"  {name}: {error}", file=sys.stderr)
            continue
        running[name] = call
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(ROUNDS):
        for name, call in running.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(DELAY_CYCLES)
            start.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / CALLS)
    return {name: round(statistics.median(t), 2) for name, t in times.items()}


def run(elements: int = ELEMENTS, selection: Selection | None = None) -> dict[str, Any]:
    """Measure the grid, or a part of it, on the current GPU; return the record.

    Times are in us, and as shares of copying. torch is called at every point, because the others must agree
    with it.
    """
    selection = selection or Selection()
    limits = ceilings("cuda")
    assert limits is not None
    measured = []
    for operator in selection.operators:
        for direction in selection.directions:
            for columns, offset in selection.points():
                print(f"{operator} {direction} {columns}+{offset}", file=sys.stderr)
                calls = calls_at(operator, direction, columns, offset, device="cuda", elements=elements)
                us = time_calls(calls, selection.implementations)
                tensors = 2 if direction == "forward" else 3
                floor = tensors * 2 * max(1, elements // columns) * columns / limits.copy * 1e6
                share = {name: round(floor / t, 4) for name, t in us.items()}
                point = {"operator": operator, "direction": direction, "columns": columns, "offset": offset}
                measured.append(point | {"us": us, "share": share})
                torch.cuda.empty_cache()
    fingerprint = machine.fingerprint("cuda")
    return {
        "format": 1,
        "machine": fingerprint,
        "copy": limits.copy,
        "elements": elements,
        "points": measured,
    }


def draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """Write one SVG file for each operator and direction to ``folder``; return them."""
    files = []
    for operator in OPERATORS:
        for direction in DIRECTIONS:
            rows = [p for p in record["points"] if p["operator"] == operator and p["direction"] == direction]
            curves = [c for name in ("cuda", "torch") for c in _curves(rows, name)]
            if not curves:
                continue
            files.append(folder / f"row-lengths-{operator}-{direction}.svg")
            render_curves(
                files[-1], curves, log_x=True,
                title=f"{operator} {direction}, bfloat16, {record['machine']['device']}",
                x="elements of a row", y="share of copying (%)",
                caption="Share of copying, for rows of whole aligned vectors of 16 bytes and for others.",
            )  # fmt: skip
    return files


def _curves(rows: list[dict[str, Any]], name: str) -> Iterator[Curve]:
    for aligned, label in ((True, "aligned"), (False, "not aligned")):
        series = sorted(
            (p["columns"], 100 * p["share"][name])
            for p in rows
            if name in p["share"] and is_aligned(p["columns"], p["offset"]) == aligned
        )
        if series:
            xs, ys = zip(*series, strict=True)
            yield Curve(f"{name}, {label}", xs, ys, style="line" if aligned else "points")


def markdown(results: Path = RESULTS, prefix: str = "../../../../") -> str:
    """Return a summary and the pictures of every committed record, or the command that measures one.

    ``prefix`` leads from the page to the root of the checkout.
    """
    parts = []
    for file in sorted(results.glob(f"*/{RECORD}")):
        record = read_json(file)
        parts.append(f"{_head(record)}\n{summary_table(record)}")
        for picture in sorted(file.parent.glob("row-lengths-*.svg")):
            parts.append(f"![{picture.stem}]({prefix}{picture.as_posix()})\n")
    return "\n".join(parts) or f"not measured yet: `{COMMAND}`\n"


def summary_table(record: dict[str, Any]) -> str:
    """Return the lowest and the median share of copying over all row lengths, in per cent."""
    rows = []
    for operator in OPERATORS:
        for direction in DIRECTIONS:
            for aligned in (True, False):
                points = [
                    p["share"]
                    for p in record["points"]
                    if (p["operator"], p["direction"]) == (operator, direction)
                    and is_aligned(p["columns"], p["offset"]) == aligned
                ]
                cells = [operator, direction, "aligned" if aligned else "not aligned"]
                for name in IMPLEMENTATIONS:
                    shares = [100 * p[name] for p in points if name in p]
                    cells.append(f"{min(shares):.0f} / {statistics.median(shares):.0f}" if shares else NONE)
                rows.append(tuple(cells))
    return table(("operator", "direction", "rows", *IMPLEMENTATIONS), rows, "   rrr")


def record_table(record: dict[str, Any]) -> str:
    """Return one record as Markdown: the share of copying by point and implementation, in per cent."""
    columns = ("operator", "direction", "row", "aligned", *IMPLEMENTATIONS)
    return f"{_head(record)}\n{table(columns, _cells(record), ' ')}"


def _head(record: dict[str, Any]) -> str:
    fingerprint = record["machine"]
    return (
        f"**{fingerprint['device']}**, {fingerprint['date'][:10]}, commit {str(fingerprint['commit'])[:10]}, "
        f"bfloat16, {record['elements'] * 2 / 1e6:.0f} MB a tensor, copying at "
        f"{record['copy'] / 1e12:.2f} TB/s: share of copying in per cent.\n"
    )


def _cells(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for p in record["points"]:
        shares = (f"{100 * p['share'][n]:.0f}" if n in p["share"] else NONE for n in IMPLEMENTATIONS)
        aligned = "yes" if is_aligned(p["columns"], p["offset"]) else "no"
        row = f"{p['columns']}" + (" from 2 bytes on" if p["offset"] else "")
        yield (p["operator"], p["direction"], row, aligned, *shares)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and draw; return 2 for invalid arguments."""
    parser = argparse.ArgumentParser(
        prog="python3 -m weft.lab.row_lengths",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="file for the record")
    parser.add_argument(
        "--draw", type=Path, metavar="FILE", help="draw a saved record beside it; no GPU needed"
    )
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=OPERATORS)
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    parser.add_argument("--columns", nargs="+", type=int, choices=LENGTHS, metavar="N", help="row lengths")
    parser.add_argument("--impl", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    options = parser.parse_args(arguments)
    try:
        if options.draw:
            for file in draw(read_json(options.draw), options.draw.parent):
                print(file)
            return 0
        if not machine.has_gpu():
            raise WeftError("the grid of row lengths", expected="an NVIDIA GPU", got="none")
        selection = Selection(
            operators=options.operators,
            directions=options.directions,
            implementations=options.impl,
            columns=options.columns,
        )
        record = run(selection=selection)
        if options.save:
            write_json(options.save, record, what="the record", hint="name another file: --save")
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(record_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
