"""Kernels as one self-contained page: source, PTX and SASS side by side, whose lines are linked."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

import jinja2
from markupsafe import Markup

from weft.workbench.inspect.facts import facts
from weft.workbench.inspect.kernel import Kernel
from weft.workbench.inspect.sass import Instruction
from weft.workbench.inspect.side import Side, side_by_side


def page(kernels: Sequence[Kernel]) -> str:
    """The page of these kernels; it asks for nothing from anywhere. Their texts are escaped."""
    return of_sides([side_by_side(k) for k in kernels])


def of_sides(sides: Sequence[Side]) -> str:
    """The page of kernels whose lines are already matched."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("weft.workbench.inspect"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    texts = {name: _as_it_stands(environment, f"page.{name}") for name in ("css", "js")}
    named = dict.fromkeys(f"{s.kernel.operator} {s.kernel.implementation}" for s in sides)
    title = f"{', '.join(named)} taken apart"
    script = base64.b64encode(hashlib.sha256(texts["js"].encode()).digest()).decode()
    return environment.get_template("page.html.j2").render(
        title=title, sides=sides, facts=facts, keys=_keys, script_hash=script, **texts
    )


def _as_it_stands(environment: jinja2.Environment, name: str) -> Markup:
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])


def _keys(side: Side, instruction: Instruction) -> str:
    """The source lines of an instruction, as the page names them: file's number, line's number."""
    found = ((side.file(p), p.line) for p in instruction.places)
    return " ".join(dict.fromkeys(f"{file}-{line}" for file, line in found if file is not None))
