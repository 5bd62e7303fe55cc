"""``weft inspect``: show the compiled code of kernels. Needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output, progress
from weft.cli.options import Files, Json, Names
from weft.core.errors import WeftError

if TYPE_CHECKING:
    from weft.workbench.explain.inspect.kernel import Kernel
    from weft.workbench.explain.inspect.subjects import Subjects

EPILOG = """Examples:
  weft inspect gelu --impl cuda --sass
  weft inspect softmax --diff cuda triton
  weft inspect softmax --with mine.cu --arch sm_100 --ptx --explain

Meaning of each line: weft help inspect"""
EXPLAIN = "explain"  # beside the names of listings: the kinds of the PTX's lines
MAX_LISTINGS = 12  # kernels whose code is listed at once


@dataclass(frozen=True, kw_only=True)
class InspectRequest:
    """Kernels to compile, and the target; None and empty fields select everything."""

    operator: str | None
    impl: str | None
    case: str | None
    direction: str | None
    arch: str
    kernel: str  # part of the kernel's name
    backends: tuple[str, ...]


def inspect(
    operator: Annotated[
        str | None, typer.Argument(metavar="OPERATOR", help="Operator, as listed by weft ops")
    ] = None,
    impl: Annotated[
        str | None, typer.Option(metavar="NAME", help="Implementation to compile [default: all]")
    ] = None,
    case: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only the kernels that this case launches")
    ] = None,
    direction: Annotated[
        str | None,
        typer.Option(metavar="forward|backward", help="Only the kernels that this direction launches"),
    ] = None,
    kernel: Annotated[str, typer.Option(metavar="TEXT", help="Only kernels whose name contains TEXT")] = "",
    arch: Annotated[str, typer.Option(metavar="sm_NN", help="GPU architecture to compile for")] = "sm_90",
    source: Annotated[bool, typer.Option("--source", help="Show source lines with instructions")] = False,
    ptx: Annotated[bool, typer.Option("--ptx", help="Show the PTX")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Explain the PTX: kinds of its lines, and what to look for")
    ] = False,
    sass: Annotated[bool, typer.Option("--sass", help="Show the SASS under its source lines")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write source, PTX and SASS side by side as an HTML page"),
    ] = None,
    diff: Annotated[
        tuple[str, str] | None, typer.Option(metavar="NAME NAME", help="Compare two implementations")
    ] = None,
    backend: Annotated[
        Names, typer.Option(metavar="NAME", help="Only implementations of this backend (repeatable)")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Summarise all operators")] = False,
    files: Files = None,
    as_json: Json = False,
) -> None:
    """Show registers, spills, occupancy, access widths, source, PTX and SASS of kernels.

    Needs no GPU: kernels are compiled for --arch. A dry run on fake tensors determines which
    kernels a case launches.
    """
    from weft.workbench.explain.inspect.subjects import Subjects, disable_interpreters

    if not operator and not everything:
        raise WeftError(
            "nothing to inspect", expected="an operator, or --all", hint="list them with weft ops"
        )
    disable_interpreters()
    subjects = Subjects(files or [])
    request = InspectRequest(
        operator=operator,
        impl=impl,
        case=case,
        direction=direction,
        arch=arch,
        kernel=kernel,
        backends=tuple(backend or ()),
    )
    watch = ending.Stopwatch()
    if diff is not None:
        _compare(request, subjects, diff, as_json)
        ending.print_verdict(f"compared: {diff[0]} and {diff[1]} ({watch})", to_stderr=as_json)
        return
    if impl is not None and operator and subjects.implementation(operator, impl).backend == "compile":
        _show_generated(operator, impl, case, subjects, as_json)
        # The code is data, such as for a file: nothing is added to it.
        ending.print_verdict(f"generated: the code of {operator} {impl} ({watch})", to_stderr=True)
        return
    kernels = _kernels(request, subjects)
    listings = [n for n, on in (("source", source), ("ptx", ptx), ("sass", sass), (EXPLAIN, explain)) if on]
    if (listings or html) and len(kernels) > MAX_LISTINGS:
        raise WeftError(
            f"{len(kernels)} kernels are too many to list",
            expected=f"at most {MAX_LISTINGS}",
            hint="select some of them with --case, --direction or --kernel",
        )
    if html is not None:
        _write_page(html, kernels)
    _show(kernels, listings, arch, as_json)
    ending.print_verdict(_verdict_line(kernels, arch, watch), to_stderr=as_json)


def _verdict_line(kernels: Sequence[Kernel], arch: str, watch: ending.Stopwatch) -> str:
    implementations = len({(k.operator, k.implementation) for k in kernels})
    operators = ending.names_text([k.operator for k in kernels], "operator")
    counts = f"{ending.count_text(len(kernels), 'kernel')} of "
    counts += ending.count_text(implementations, "implementation")
    return f"compiled: {counts} of {operators} for {arch} ({watch})"


def _kernels(request: InspectRequest, subjects: Subjects) -> list[Kernel]:
    """Compile and return the requested kernels; raise :class:`WeftError` if there are none."""
    from weft.core import registry
    from weft.workbench.explain.inspect.compile import compile_kernels, with_counts
    from weft.workbench.explain.inspect.subjects import default_case

    kernels = []
    with progress.Progress() as status:
        for name in [request.operator] if request.operator else registry.operator_names():
            operator = subjects.operator(name)
            if request.impl is not None:
                implementations = [subjects.implementation(name, request.impl)]
            else:
                implementations = [
                    i
                    for i in subjects.compilable(name)
                    if not request.backends or i.backend in request.backends
                ]
            for implementation in implementations:
                case = request.case
                if case is None and not implementation.aot_kernels and implementation in subjects.external:
                    # An external file lists no kernels to compile; only a case's launches show them.
                    case = default_case(operator, implementation).name
                kernels += compile_kernels(
                    operator,
                    implementation,
                    request.arch,
                    case=case,
                    direction=request.direction,
                    matching=request.kernel,
                    log=status,
                )
    if not kernels:
        raise WeftError("kernels", expected="some", got=f"none in {', '.join(request.backends)}")
    return with_counts(kernels)


def _to_json(kernel: Kernel, listings: Sequence[str]) -> dict[str, Any]:
    from weft.workbench.explain.inspect import ptx

    # A program reads the text as it is: the kinds of its lines are data of their own.
    plain = _listings(kernel, [name for name in listings if name != EXPLAIN])
    data = kernel.to_json() | {name: "\n".join(lines) for name, lines in plain.items()}
    if EXPLAIN in listings:
        counts = ptx.count_kinds(kernel.ptx_lines)
        data |= {"ptx_kinds": [row.to_json() for row in counts], "ptx_remarks": ptx.remarks(counts)}
    return data


def _listings(kernel: Kernel, options: Sequence[str]) -> dict[str, list[str]]:
    """Return the lines of a kernel's ``source``, ``ptx`` or ``sass``, by name."""
    from weft.workbench.explain.inspect import text
    from weft.workbench.explain.inspect.listing import make_listing

    names = [name for name in options if name != EXPLAIN]
    if not names:
        return {}
    listing = make_listing(kernel)
    lines = {name: list(getattr(text, name)(listing)) for name in names}
    if EXPLAIN in options and "ptx" in lines:
        lines["ptx"] = list(text.ptx_explained(listing))
    return lines


def _show(kernels: Sequence[Kernel], listings: Sequence[str], arch: str, as_json: bool) -> None:
    """Print a summary of each implementation's kernels with its notes, then the listings; or all as JSON."""
    from weft.workbench.explain.inspect import ptx, text

    if as_json:
        print(json.dumps({"arch": arch, "kernels": [_to_json(k, listings) for k in kernels]}))
        return
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.operator, kernel.implementation), []).append(kernel)
    for (operator, implementation), group in groups.items():
        compilers = dict.fromkeys(f"{k.program.by} for {k.program.target}" for k in group)
        output.show_notes([f"{operator} {implementation}: {', '.join(compilers)}"], style="bold")
        table = text.summary(group)
        # Columns of facts that do not fit side by side stand below each other.
        for each in [table] if output.fits(table) else [text.summary([k]) for k in group]:
            output.show_table(each)
        for note in dict.fromkeys(note for k in group for note in k.notes):
            names = ", ".join(dict.fromkeys(k.name for k in group if note in k.notes))
            output.show_notes([f"note: {names}: {note}"])
        print()
    for kernel in kernels:
        for name, lines in _listings(kernel, listings).items():
            print(f"== {kernel.title}: {name}")
            print(*lines, sep="\n")
            print()
        if EXPLAIN in listings:
            counts = ptx.count_kinds(kernel.ptx_lines)
            print(f"== {kernel.title}: kinds of its PTX")
            output.show_table(text.ptx_kinds(counts))
            output.show_notes(f"look at: {remark}" for remark in ptx.remarks(counts))
            print()


def _write_page(file: Path, kernels: Sequence[Kernel]) -> None:
    from weft.workbench.explain.inspect.page import page

    try:
        file.write_text(page(kernels), encoding="utf-8")
    except OSError as error:
        raise WeftError("--html", expected="a file that can be written", got=str(error)) from error
    output.log(f"wrote {file}")


def _compare(request: InspectRequest, subjects: Subjects, names: tuple[str, str], as_json: bool) -> None:
    """Compare two implementations at one case: the requested one, or the first that both support."""
    from weft.core import FORWARD
    from weft.workbench.explain.inspect import facts, text
    from weft.workbench.explain.inspect.compile import compile_kernels, target_number, with_counts
    from weft.workbench.explain.inspect.subjects import default_case

    if not request.operator:
        raise WeftError("--diff", expected="an operator whose implementations to compare")
    operator = subjects.operator(request.operator)
    pair = [subjects.implementation(operator.name, name) for name in names]
    for implementation in pair:
        target_number(implementation, request.arch)
    case = request.case or default_case(operator, *pair).name
    direction = request.direction or FORWARD
    with progress.Progress() as status:
        left, right = (
            with_counts(
                compile_kernels(
                    operator,
                    implementation,
                    request.arch,
                    case=case,
                    direction=direction,
                    matching=request.kernel,
                    log=status,
                )
            )
            for implementation in pair
        )
    if as_json:
        print(json.dumps(facts.comparison_json(left, right, case, direction)))
        return
    print(f"{operator.name} {case} {direction}, {request.arch}: {names[0]} and {names[1]}")
    output.show_table(text.comparison(left, right))


def _show_generated(operator: str, impl: str, case: str | None, subjects: Subjects, as_json: bool) -> None:
    """Print the code that torch.compile generates: Triton on a GPU, C++ elsewhere."""
    from weft.workbench.explain.inspect.generated import generated

    of = subjects.operator(operator)
    code = generated(of, subjects.implementation(operator, impl), of.case(case) if case else None)
    if as_json:
        print(json.dumps(code.to_json()))
    else:
        print(code.text(), end="")
