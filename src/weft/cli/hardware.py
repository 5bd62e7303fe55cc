"""``weft hardware``: published figures of GPUs, their ridge points, and the roof of any operator on each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output
from weft.cli.options import Csv, Json

if TYPE_CHECKING:
    from weft.core import Case, Cost
    from weft.core.table import Table
    from weft.machine.specs import GpuSpec

EPILOG = """Examples:
  weft hardware
  weft hardware h100-sxm
  weft hardware --operator softmax --case bf16-32768x4096

Meaning of each column, and the documents: weft help hardware"""
NOTES = (
    "Rates are TFLOP/s, dense, at the boost clock, with fp32 accumulation; half of a vendor's figure with "
    "2:4 sparsity. GB/s is the datasheet's memory bandwidth; its highest figure where documents differ (~).",
    "ridge: FLOPs a byte from which on a bf16 (or fp16) product is compute-bound. square: the least n for "
    "which an n x n product can be.",
)


def hardware(
    name: Annotated[
        str | None, typer.Argument(metavar="GPU", help="GPU to show in detail [default: list all]")
    ] = None,
    operator: Annotated[
        str | None,
        typer.Option("--operator", metavar="NAME", help="Show the shortest possible time of this operator"),
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(
            "--case", metavar="NAME", help="With --operator: case [default: the first that is worth timing]"
        ),
    ] = None,
    direction: Annotated[
        str,
        typer.Option("--direction", metavar="forward|backward", help="With --operator: direction"),
    ] = "forward",
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Show what NVIDIA's GPUs can do at best, by their datasheets: memory, rates, ridge points.

    With --operator: the roof on each GPU, that is the shortest time that the operator's bytes and FLOPs
    allow. No kernel runs.

    Exit 0: shown; 2: invalid arguments.
    """
    from weft.core import WeftError
    from weft.machine import specs

    output.only_one_format(json=as_json, csv=as_csv)
    gpus = specs.find(name) if name is not None else specs.all_specs()
    if operator is None and (case is not None or direction != "forward"):
        raise WeftError("--case and --direction", expected="--operator as well", got="none")
    chosen = None if operator is None else _case(operator, case, direction)
    if as_json:
        print(json.dumps(to_json(gpus, operator, chosen, direction), indent=1))
    elif operator is not None and chosen is not None:
        _print(roofs_table(gpus, operator, chosen, direction), as_csv)
    elif as_csv:
        output.print_csv(specs_table(gpus))
    elif name is not None and len(gpus) == 1:
        output.show_table(detail_table(gpus[0]))
    else:
        output.show_table(specs_table(gpus), options=("json", "csv"))
    subject = f", roof of {operator} {chosen.name} {direction}" if chosen is not None else ""
    ending.print_verdict(
        f"shown: {ending.count_text(len(gpus), 'GPU')}{subject}", to_stderr=as_json or as_csv
    )


def _print(table: Table, as_csv: bool) -> None:
    if as_csv:
        output.print_csv(table)
    else:
        output.show_table(table, options=("json", "csv"))


def _case(operator: str, case: str | None, direction: str) -> Case:
    from weft.core import WeftError, registry

    loaded = registry.operator(operator)
    if direction not in loaded.directions:
        expected = " or ".join(loaded.directions)
        raise WeftError(f"--direction of {operator}", expected=expected, got=direction)
    if case is not None:
        return loaded.case(case)
    return loaded.select("bench", "cuda")[0]


def _cost(operator: str, case: Case, direction: str) -> Cost:
    from weft.lab.claims.bounds import operator_cost

    return operator_cost(operator, case, direction)


def to_json(
    gpus: Sequence[GpuSpec], operator: str | None, case: Case | None, direction: str
) -> dict[str, Any]:
    """Return the table as JSON; with an operator, each GPU has its roof."""
    if operator is None or case is None:
        return {"gpus": [gpu.to_json() for gpu in gpus]}
    cost = _cost(operator, case, direction)
    rows = []
    for gpu in gpus:
        roof = gpu.roof(cost)
        seconds = {"roof_us": roof.seconds * 1e6, "limit": roof.limit} if roof else None
        rows.append(gpu.to_json() | {"roof": seconds})
    subject = {"operator": operator, "case": case.name, "direction": direction}
    work = {"nbytes": cost.nbytes, "flops": cost.flops, "rate": cost.rate}
    return {**subject, "cost": work, "gpus": rows}


def _number(value: float | None, digits: str = "g", mark: str = "") -> str:
    from weft.core.table import Number

    return Number("-", None) if value is None else Number(f"{mark}{value:{digits}}", value)


def specs_table(gpus: Sequence[GpuSpec]) -> Table:
    """Return a row for each GPU."""
    from weft.core.table import Column, Table
    from weft.machine.specs import RATES

    rows = []
    for gpu in gpus:
        half = "bf16" if "bf16" in gpu.tflops else "fp16"
        mark = "~" if gpu.bandwidth_is_disputed else ""
        rows.append(
            [
                gpu.key,
                _number(gpu.sm_count),
                _number(gpu.boost_mhz),
                _number(gpu.l2_mib),
                _number(gpu.smem_kib),
                _number(gpu.memory_gb),
                _number(gpu.bandwidth_gbps[1], mark=mark),
                *(_number(gpu.tflops.get(rate)) for rate in RATES),
                _number(gpu.ridge(half), ".0f"),
                _number(gpu.smallest_square(half)),
                _number(gpu.tdp_w),
                str(gpu.document),
            ]
        )
    essential = ("fp32", "fp16", "fp8")
    columns = (
        Column("GPU"),
        Column("SMs", numeric=True),
        Column("MHz", 3, numeric=True, unit="MHz"),
        Column("L2", 3, numeric=True, unit="MiB"),
        Column("smem", 3, numeric=True, unit="KiB"),
        Column("GB", numeric=True, unit="GB"),
        Column("GB/s", numeric=True, unit="GB/s"),
        *(Column(r, 0 if r in essential else 2, numeric=True, unit="TFLOP/s") for r in RATES),
        Column("ridge", numeric=True),
        Column("square", 1, numeric=True),
        Column("W", 2, numeric=True, unit="W"),
        Column("document", 4, fold=20),
    )
    return Table(columns, rows, notes=NOTES)


def detail_table(gpu: GpuSpec) -> Table:
    """Return all that the table knows of one GPU, a line each."""
    from weft.core.table import Column, Table

    def text(value: object, unit: str) -> str:
        return "not known for sure" if value is None else f"{value} {unit}".strip()

    low, high = gpu.bandwidth_gbps
    rows = [
        ("architecture", gpu.arch),
        ("SMs", text(gpu.sm_count, "")),
        ("boost clock", text(gpu.boost_mhz, "MHz")),
        ("L2", text(gpu.l2_mib, "MiB")),
        ("shared memory", text(gpu.smem_kib, "KiB an SM")),
        ("memory", f"{text(gpu.memory_gb, 'GB')} {gpu.memory}"),
        ("memory bus", f"{text(gpu.bus_bits, 'bits')}, {text(gpu.gbit_per_pin, 'Gbit/s a pin')}"),
        ("bandwidth", f"{high:g} GB/s" if low == high else f"{low:g} or {high:g} GB/s"),
        ("power", text(gpu.tdp_w, "W")),
    ]
    if gpu.matrix_mhz:
        rows.append(("matrix clock", f"{gpu.matrix_mhz} MHz, for rates below fp32"))
    for rate, tflops in gpu.tflops.items():
        bound = f"ridge {gpu.ridge(rate):.0f} FLOP/byte, square product from {gpu.smallest_square(rate)}"
        rows.append((rate, f"{tflops:g} TFLOP/s, {bound}"))
    rows.append(("document", str(gpu.document)))
    rows.append(("", gpu.document.url))
    notes = [*NOTES[:1], *([gpu.note] if gpu.note else [])]
    return Table([Column(""), Column("", fold=20)], rows, title=f"{gpu.name} ({gpu.key})", notes=notes)


def roofs_table(gpus: Sequence[GpuSpec], operator: str, case: Case, direction: str) -> Table:
    """Return the roof of one case on each GPU."""
    from weft.core.table import Column, Number, Table

    cost = _cost(operator, case, direction)
    rows = []
    for gpu in gpus:
        roof = gpu.roof(cost)
        if roof is None:
            rows.append(
                [gpu.key, Number("-", None), f"no {cost.rate} rate", Number("", None), str(gpu.document)]
            )
            continue
        rate = cost.flops / roof.seconds / 1e12 if cost.flops and roof.seconds else None
        rows.append(
            [
                gpu.key,
                Number(f"{roof.seconds * 1e6:.1f} us", roof.seconds * 1e6),
                roof.limit,
                Number("" if rate is None else f"{rate:.4g}", rate),
                str(gpu.document),
            ]
        )
    columns = (
        Column("GPU"),
        Column("roof", numeric=True, unit="us"),
        Column("limit"),
        Column("TFLOP/s", numeric=True, unit="TFLOP/s"),
        Column("document", 1),
    )
    work = f"{cost.nbytes / 1e6:,.4g} MB" + (
        f", {cost.flops / 1e9:,.6g} GFLOP ({cost.rate})" if cost.rate else ""
    )
    notes = ["No kernel can be faster from cold caches: bytes / GB/s or FLOPs / rate, the larger one."]
    return Table(columns, rows, title=f"{operator}  {case.name}  {direction}: {work}", notes=notes)
