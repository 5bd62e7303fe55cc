"""``weft debug``: one program of a Triton kernel in Triton's interpreter, its accesses, bounds and races."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output
from weft.cli.options import MAX_SEED, Files, Json
from weft.core.errors import WeftError

if TYPE_CHECKING:
    from weft.core import Case, Implementation, Operator
    from weft.lab.triton_trace import Launch, Trace

EPILOG = """Examples:
  weft debug layer_norm --program 1
  weft debug embedding --direction backward --kernel merge --json
  weft debug gelu --program 3 --pdb

Seven tools, each on a small broken kernel: weft help debugging"""
PROGRAM = re.compile(r"\d{1,9}(,\d{1,9}){0,2}")
UNSAFE_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # the interpreter computes them wrongly


def debug(
    operator: Annotated[str, typer.Argument(metavar="OPERATOR", help="Operator, as listed by weft ops")],
    impl: Annotated[
        str | None,
        typer.Option(
            "--impl", metavar="NAME", help="Triton implementation [default: triton, or your file's]"
        ),
    ] = None,
    program: Annotated[
        str, typer.Option(metavar="X[,Y[,Z]]", help="Program to stop in, by its ids in the grid")
    ] = "0",
    case: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Case to run [default: the first check case with the program]"),
    ] = None,
    direction: Annotated[str, typer.Option(metavar="forward|backward", help="Direction to run")] = "forward",
    kernel: Annotated[
        str, typer.Option(metavar="TEXT", help="Stop in the first kernel whose name contains TEXT")
    ] = "",
    line: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Stop at line N of the kernel's file and show its variables"),
    ] = None,
    use_pdb: Annotated[bool, typer.Option("--pdb", help="Stop in Python's debugger")] = False,
    files: Files = None,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=MAX_SEED, help="Random seed of the inputs")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Run an operator's Triton kernel on the CPU and show each load and store of one program.

    All programs run in Triton's interpreter, and all their accesses are examined: those out of bounds, and
    races between programs. No GPU is needed; bfloat16 and fp8, which the interpreter gets wrong, are refused.

    Exit 0: no access is out of bounds and no race is certain; 1: there is one; 2: invalid arguments.
    """
    chosen_program = _parse_program(program)
    if use_pdb and as_json:
        raise WeftError("only one of --pdb and --json", expected="one", got="both")
    # Triton reads the variable at its import.
    os.environ["TRITON_INTERPRET"] = "1"
    from weft.workbench.explain.inspect.subjects import Subjects

    subjects = Subjects(files or [])
    of = subjects.operator(operator)
    implementation = _implementation(subjects, operator, impl)
    cases = _cases(of, implementation, case, direction)
    watch = ending.Stopwatch()

    def run(chosen: Case) -> Trace | None:
        return _run(of, implementation, chosen, direction, seed, chosen_program, kernel, line, use_pdb)

    chosen_case, trace = _first_with_program(cases, run)
    if trace is None:
        ending.print_verdict("left the debugger: nothing is examined", to_stderr=True)
        return
    title = f"{operator} {implementation.name} {chosen_case.name} {direction}"
    if as_json:
        print(json.dumps(_to_json(trace, operator, implementation.name, chosen_case.name, direction, seed)))
    else:
        _show(trace, title)
    certain = _certain(trace)
    ending.print_verdict(_verdict_line(trace, watch), to_stderr=as_json)
    if certain:
        raise typer.Exit(1)


def _parse_program(text: str) -> tuple[int, ...]:
    if not PROGRAM.fullmatch(text):
        hint = "the ids along x, y and z; ids that are left out are 0"
        raise WeftError("--program", expected="one to three ids, such as 3 or 3,0", got=text, hint=hint)
    return tuple(map(int, text.split(",")))


def _implementation(subjects: Any, operator: str, impl: str | None) -> Implementation:
    """Return the named implementation, or else the external one, or else ``triton``."""
    from weft.core.operator import unknown_name

    if impl is None:
        external = [i.name for i in subjects.external if i.operator == operator]
        if len(external) > 1:
            raise WeftError("--impl", expected=" or ".join(external), got="none")
        if subjects.external and not external:
            others = sorted({i.operator for i in subjects.external})
            raise WeftError("--with", expected=f"an implementation of {operator}", got=", ".join(others))
        impl = external[0] if external else "triton"
        if impl not in subjects.implementations(operator):
            raise unknown_name(
                f"implementation of {operator}", impl, list(subjects.implementations(operator))
            )
    implementation: Implementation = subjects.implementation(operator, impl)
    if implementation.backend != "triton":
        raise WeftError(
            f"{operator} {impl}",
            expected="an implementation in Triton",
            got=f"one in {implementation.backend}",
            hint="weft help debugging has the debuggers of CUDA C++",
        )
    return implementation


def _first_with_program(
    cases: Sequence[Case], run: Callable[[Case], Trace | None]
) -> tuple[Case, Trace | None]:
    """Return the first case whose grid has the program, and its trace.

    Raises the error of the case with the largest grid if none has it.
    """
    errors = []
    for case in cases:
        try:
            return case, run(case)
        except WeftError as error:
            if error.what != "--program":
                raise
            errors.append(error)
    raise max(errors, key=lambda error: [int(n) for n in re.findall(r"\d+", str(error.expected))])


def _cases(
    operator: Operator, implementation: Implementation, name: str | None, direction: str
) -> list[Case]:
    """Return the named case, or else all check cases that the interpreter computes correctly."""
    from weft.backends.support import support
    from weft.core.operator import DIRECTIONS, unknown_name

    if direction not in DIRECTIONS:
        raise unknown_name("direction", direction, list(DIRECTIONS))
    if direction not in operator.directions:
        raise WeftError("--direction", expected=" or ".join(operator.directions), got=direction)

    def reason(case: Case) -> str:
        unsafe = sorted({i.dtype for i in case.inputs if i.dtype in UNSAFE_DTYPES})
        if unsafe:
            return f"Triton's interpreter computes {', '.join(unsafe)} wrongly"
        answer = support(implementation, case, "cpu", direction)
        return "" if answer else answer.reason

    if name is not None:
        case = operator.case(name)
        if why := reason(case):
            supported = [c.name for c in operator.cases if "cpu" in c.devices and not reason(c)]
            hint = f"for instance {', '.join(supported[:3])}" if supported else None
            raise WeftError(f"--case {name}", expected="a case that the interpreter runs", got=why, hint=hint)
        return [case]
    cases = [c for c in operator.select("check", "cpu") if all(i.numel for i in c.inputs) and not reason(c)]
    if not cases:
        refusals = "; ".join(sorted({reason(c) for c in operator.cases}))
        raise WeftError(f"{operator.name} {implementation.name}: no case runs here", got=refusals)
    return cases


def _run(
    operator: Operator,
    implementation: Implementation,
    case: Case,
    direction: str,
    seed: int,
    program: tuple[int, ...],
    kernel: str,
    line: int | None,
    use_pdb: bool,
) -> Trace | None:
    """Call the implementation once and return its trace; None if the user left the debugger."""
    from weft.core.operator import unknown_name
    from weft.lab.triton_trace import Stopped, Trace, tracing

    call = _closure(operator, implementation, case, direction, seed)
    start = _debugger(line) if use_pdb else None
    trace = Trace(program, kernel=kernel, line=line, start_debugger=start)
    try:
        with tracing(trace):
            call()
    except Stopped:
        return None
    if trace.selected is None:
        names = list(dict.fromkeys(launch.kernel for launch in trace.launches))
        if not names:
            raise WeftError(f"{operator.name} {case.name}", expected="a launch of a kernel", got="none")
        raise unknown_name("kernel of this call", kernel, names)
    if line is not None and not use_pdb and trace.variables is None:
        lines = sorted(trace.lines)
        expected = (
            f"a line that the program reaches, {lines[0]} to {lines[-1]}" if lines else "a reached line"
        )
        raise WeftError("--line", expected=expected, got=line, hint=f"lines of {trace.selected.file}")
    return trace


def _closure(
    operator: Operator, implementation: Implementation, case: Case, direction: str, seed: int
) -> Callable[[], Any]:
    from weft.core import BACKWARD
    from weft.workbench.calls import inputs as case_inputs
    from weft.workbench.calls.bind import bind, differentiable_outputs

    inputs = case_inputs.make(case, "cpu", seed)
    grad = None
    if direction == BACKWARD:
        output_ = implementation.forward(*inputs, **dict(case.params))
        grad = case_inputs.gradient_like(differentiable_outputs(operator, output_), seed, device="cpu")
    return bind(operator, implementation, case, direction, inputs, grad)


def _debugger(line: int | None) -> Callable[[Launch], None]:
    """Return a function that starts pdb in the next function that is called: the kernel."""
    import pdb  # noqa: T100

    def start(launch: Launch) -> None:
        if line is not None and line not in (lines := _lines_of_code(launch.file)):
            after = min((n for n in lines if n > line), default=max(lines))
            raise WeftError("--line", expected=f"a line with code, such as {after}", got=line)
        debugger = pdb.Pdb(skip=["triton.*", "weft.lab.triton_trace"], nosigint=True)
        if line is not None:
            debugger.cmdqueue += [f"tbreak {launch.file}:{line}", "continue"]
        debugger.reset()
        sys.settrace(debugger.trace_dispatch)

    return start


def _lines_of_code(file: str) -> set[int]:
    """Return the lines of a Python file to which its code belongs."""
    from pathlib import Path
    from types import CodeType

    codes, lines = [compile(Path(file).read_text(encoding="utf-8"), file, "exec")], set()
    while codes:
        code = codes.pop()
        lines |= {number for *_, number in code.co_lines() if number is not None}
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
    return lines


def _certain(trace: Trace) -> bool:
    return any(launch.out_of_bounds or (launch.races and not launch.atomics) for launch in trace.launches)


def _ids(program: tuple[int, ...]) -> str:
    return ",".join(map(str, program))


def _show(trace: Trace, title: str) -> None:
    """Print the program's arguments and accesses, the variables at the line, and what was found."""
    from weft.core.table import Column, Table
    from weft.lab import access_text

    launch = trace.selected
    assert launch is not None
    heading = f"{title}: {launch.kernel}, program {_ids(trace.program)} of {_ids(launch.grid)}"
    output.show_notes([heading, f"  {os.path.relpath(launch.file)}"], style="bold")
    rows = [[a.name, access_text.argument_text(a)] for a in launch.arguments]
    output.show_table(Table([Column("argument"), Column("value", fold=30)], rows))
    print()
    rows = [
        [
            str(a.line),
            a.kind,
            a.tensor,
            access_text.offsets_text(a.offsets, a.active),
            access_text.mask_text(a),
            access_text.values_text(a.values, a.active),
            access_text.outside_text(a),
        ]
        for a in trace.accesses
    ]
    columns = [
        Column("line", numeric=True),
        Column("access"),
        Column("tensor"),
        Column("element offsets", fold=20),
        Column("mask", priority=1),
        Column("values", priority=2, fold=20),
        Column("out of bounds", fold=12),
    ]
    output.show_table(Table(columns, rows))
    if trace.variables is not None:
        print()
        values = [[name, text] for name, text in access_text.variables(trace).items()]
        title = f"Variables at line {trace.line}"
        output.show_table(Table([Column("variable"), Column("value", fold=30)], values, title=title))
    if findings := _findings(trace):
        print()
        output.show_notes(findings, style="")


def _findings(trace: Trace) -> list[str]:
    """Return a line for each access out of bounds and each race of all launches."""
    lines = []
    for launch in trace.launches:
        for o in launch.out_of_bounds.values():
            count = ending.count_text(o.elements, "element")
            lines.append(
                f"out of bounds: {o.kind} in line {o.line} of {launch.kernel}: {o.tensor}[{o.offset}], whose "
                f"memory ends before [{o.size}], first by program {_ids(o.program)}; {count} in all"
            )
        for each in launch.races:
            doubt = "race, unless the atomics of the kernel order it" if launch.atomics else "race"
            lines.append(
                f"{doubt}: {launch.kernel}: {each.text} ({ending.count_text(each.elements, 'element')})"
            )
        if launch.gaps:
            lines.append(
                f"note: {launch.kernel} accesses {ending.count_text(launch.gaps, 'element')} that are in the "
                "memory of an argument and no element of it: between its rows, before or behind it"
            )
    return lines


def _verdict_line(trace: Trace, watch: ending.Stopwatch) -> str:
    programs = sum(launch.programs for launch in trace.launches)
    outside = sum(o.elements for launch in trace.launches for o in launch.out_of_bounds.values())
    races = sum(len(launch.races) for launch in trace.launches)
    counts = f"{ending.count_text(programs, 'program')} of {ending.count_text(len(trace.launches), 'launch')}"
    counts = counts.replace("launchs", "launches")
    state = "failed" if _certain(trace) else "passed"
    outside_text = (
        f"{ending.count_text(outside, 'element')} out of bounds" if outside else "none out of bounds"
    )
    race_text = ending.count_text(races, "race") if races else "no race"
    return f"{state}: {counts}: {outside_text}, {race_text} ({watch})"


def _to_json(trace: Trace, operator: str, impl: str, case: str, direction: str, seed: int) -> dict[str, Any]:
    from weft.lab import access_text

    launch = trace.selected
    assert launch is not None
    fields: dict[str, Any] = {"operator": operator, "implementation": impl, "case": case}
    fields |= {"direction": direction, "seed": seed, "kernel": launch.kernel, "file": launch.file}
    fields |= {"program": list(trace.program), "grid": list(launch.grid)}
    fields["arguments"] = [access_text.argument_json(a) for a in launch.arguments]
    fields["accesses"] = [access_text.access_json(a) for a in trace.accesses]
    fields["variables"] = access_text.variables(trace) if trace.variables is not None else None
    fields["out_of_bounds"] = [
        {
            "kernel": o.kernel,
            "kind": o.kind,
            "line": o.line,
            "tensor": o.tensor,
            "program": list(o.program),
            "offset": o.offset,
            "elements": o.elements,
        }
        for each in trace.launches
        for o in each.out_of_bounds.values()
    ]
    fields["races"] = [
        {
            "kernel": each.kernel,
            "tensor": r.tensor,
            "offset": r.offset,
            "first": r.first,
            "second": r.second,
            "same_value": r.same_value,
            "certain": not each.atomics,
            "elements": r.elements,
        }
        for each in trace.launches
        for r in each.races
    ]
    return fields
