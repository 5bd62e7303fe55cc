"""``weft inspect``: what the compiler made of a kernel, taken apart with no GPU."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.options import Files, Names
from weft.core.errors import WeftError

if TYPE_CHECKING:
    from weft.workbench.inspect.choose import Ways
    from weft.workbench.inspect.kernel import Kernel

EPILOG = "Example: weft inspect gelu --impl cuda --sass. What each line means: docs/inspect.md"
MOST = 12  # kernels whose code is listed at once


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which kernels a call asks for, and for which target."""

    operator: str | None
    impl: str | None
    case: str | None
    direction: str | None
    arch: str
    kernel: str
    backends: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Which of a kernel's texts are to be shown."""

    source: bool
    ptx: bool
    sass: bool

    def __bool__(self) -> bool:
        return self.source or self.ptx or self.sass


Operator = Annotated[str | None, typer.Argument(help="An operator: see weft ops.")]
Impl = Annotated[str | None, typer.Option(metavar="NAME", help="One implementation; else all.")]
Case = Annotated[str | None, typer.Option(metavar="NAME", help="Only what this case launches.")]
Direction = Annotated[
    str | None, typer.Option(metavar="forward|backward", help="Only what this one launches.")
]
Matching = Annotated[
    str, typer.Option(metavar="TEXT", help="Only kernels and specimens whose name holds this.")
]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write source, PTX and SASS as a page.")
]
Diff = Annotated[
    tuple[str, str] | None, typer.Option(metavar="I1 I2", help="Compare two implementations.")
]
Backends = Annotated[
    Names, typer.Option(metavar="NAME", help="Only implementations in it; may repeat.")
]


def inspect(
    operator: Operator = None,
    impl: Impl = None,
    case: Case = None,
    direction: Direction = None,
    kernel: Matching = "",
    arch: Annotated[str, typer.Option(metavar="sm_NN", help="What to compile for.")] = "sm_90",
    source: Annotated[bool, typer.Option("--source", help="The source that became code.")] = False,
    ptx: Annotated[bool, typer.Option("--ptx", help="The PTX.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="SASS under its source lines.")] = False,
    html: Html = None,
    diff: Diff = None,
    backend: Backends = None,
    everything: Annotated[bool, typer.Option("--all", help="Every operator, in brief.")] = False,
    files: Files = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Take kernels apart: registers, spills, occupancy, widths of accesses, source, PTX and SASS.

    Needs no GPU: kernels are compiled for --arch. What a case launches is found by a rehearsal.
    """
    from weft.workbench.inspect.choose import Ways, compile_here

    if not operator and not everything:
        raise WeftError("inspect what?", expected="an operator, or --all", hint="see: weft ops")
    compile_here()
    ways = Ways(files or [])
    wanted = Wanted(
        operator=operator,
        impl=impl,
        case=case,
        direction=direction,
        arch=arch,
        kernel=kernel,
        backends=tuple(backend or ()),
    )
    if diff is not None:
        _compare(wanted, ways, diff, json)
        return
    if impl is not None and operator and ways.implementation(operator, impl).backend == "compile":
        _generated(wanted, ways, json)
        return
    found = _kernels(wanted, ways)
    texts = Texts(source=source, ptx=ptx, sass=sass)
    if (texts or html) and len(found) > MOST:
        raise WeftError(
            f"{len(found)} kernels are too many to list",
            expected=f"at most {MOST}",
            hint="name some of them with --case, --direction or --kernel",
        )
    if html is not None:
        _write(html, found)
    if json:
        print(jsonlib.dumps({"arch": arch, "kernels": [_data(k, texts) for k in found]}))
    else:
        _show(found, texts)


def _say(line: str) -> None:
    """Progress on a terminal's stderr, one line rewritten; nothing in a pipe."""
    import sys

    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _kernels(wanted: Wanted, ways: Ways) -> list[Kernel]:
    """The kernels that a call names; raises :class:`WeftError` where there are none."""
    from weft.core import registry
    from weft.workbench.inspect.choose import usual_case
    from weft.workbench.inspect.gather import compiled, counted

    found = []
    for name in [wanted.operator] if wanted.operator else registry.operator_names():
        operator = ways.operator(name)
        chosen = [i for i in ways.compiling(name) if i.backend in (wanted.backends or (i.backend,))]
        if wanted.impl is not None:
            chosen = [ways.implementation(name, wanted.impl)]
        for one in chosen:
            case = wanted.case
            if case is None and not one.specimens and one in ways.brought:
                case = usual_case(operator, one).name  # nothing else tells what it compiles
            found += compiled(
                operator,
                one,
                wanted.arch,
                case=case,
                direction=wanted.direction,
                matching=wanted.kernel,
                progress=_say,
            )
    _say("")
    if not found:
        raise WeftError("kernels", expected="some", got=f"none in {', '.join(wanted.backends)}")
    return counted(found)


def _data(kernel: Kernel, texts: Texts) -> dict[str, Any]:
    from weft.workbench.inspect import text
    from weft.workbench.inspect.side import side_by_side

    data = kernel.to_json()
    if texts:
        side = side_by_side(kernel)
        for name in ("source", "ptx", "sass"):
            if getattr(texts, name):
                data[name] = "\n".join(getattr(text, name)(side))
    return data


def _show(found: Sequence[Kernel], texts: Texts) -> None:
    from weft.workbench import table
    from weft.workbench.inspect import text
    from weft.workbench.inspect.side import side_by_side

    out = table.console()
    for _, group in _by_implementation(found).items():
        first = group[0]
        by = dict.fromkeys(f"{k.program.by} for {k.program.target}" for k in group)
        title = f"[bold]{first.operator} {first.implementation}[/]"
        out.print(f"{title}: {', '.join(by)}", soft_wrap=True)
        out.print(text.summary(group))
        for note in dict.fromkeys(note for k in group for note in k.notes):
            about = ", ".join(dict.fromkeys(k.name for k in group if note in k.notes))
            out.print(f"note: {about}: {note}", style="dim", soft_wrap=True)
        print()
    for kernel in found if texts else ():
        side = side_by_side(kernel)
        for name in ("source", "ptx", "sass"):
            if getattr(texts, name):
                print(f"== {kernel.title}: {name}")
                print(*getattr(text, name)(side), sep="\n")
                print()


def _by_implementation(found: Sequence[Kernel]) -> dict[tuple[str, str], list[Kernel]]:
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in found:
        groups.setdefault((kernel.operator, kernel.implementation), []).append(kernel)
    return groups


def _write(file: Path, found: Sequence[Kernel]) -> None:
    from weft.workbench.inspect.page import page

    try:
        file.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise WeftError("--html", expected="a file that can be written", got=str(error)) from error
    typer.echo(f"wrote {file}", err=True)


def _compare(wanted: Wanted, ways: Ways, diff: tuple[str, str], json: bool) -> None:
    """Two implementations at one case, forward unless told otherwise."""
    from weft.workbench import table
    from weft.workbench.inspect import facts, text
    from weft.workbench.inspect.choose import usual_case, usual_direction
    from weft.workbench.inspect.gather import able, kernels

    if not wanted.operator:
        raise WeftError("--diff", expected="an operator, whose implementations are compared")
    operator = ways.operator(wanted.operator)
    both = [ways.implementation(operator.name, name) for name in diff]
    for one in both:
        able(one, wanted.arch)
    case = wanted.case or usual_case(operator, *both).name
    direction = wanted.direction or usual_direction(*both)
    left, right = (
        kernels(
            operator,
            one,
            wanted.arch,
            case=case,
            direction=direction,
            matching=wanted.kernel,
            progress=_say,
        )
        for one in both
    )
    _say("")
    if json:
        print(jsonlib.dumps(facts.compared_json(left, right, case, direction)))
        return
    print(f"{operator.name} {case} {direction}, {wanted.arch}: {diff[0]} and {diff[1]}")
    table.console().print(text.comparison(left, right))


def _generated(wanted: Wanted, ways: Ways, json: bool) -> None:
    """What torch.compile writes: C++ where there is no GPU, Triton where there is one."""
    from weft.workbench.inspect.generated import generated

    assert wanted.operator and wanted.impl
    operator = ways.operator(wanted.operator)
    one = ways.implementation(operator.name, wanted.impl)
    made = generated(operator, one, operator.case(wanted.case) if wanted.case else None)
    if json:
        print(jsonlib.dumps(made.to_json()))
    else:
        print(made.text(), end="")
