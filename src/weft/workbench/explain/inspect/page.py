"""Self-contained HTML page of kernels: source, PTX and SASS side by side, with linked lines."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

import jinja2
from markupsafe import Markup

from weft.workbench.explain.inspect.facts import facts
from weft.workbench.explain.inspect.kernel import Kernel
from weft.workbench.explain.inspect.listing import Listing, make_listing
from weft.workbench.explain.inspect.sass import Instruction


def page(kernels: Sequence[Kernel]) -> str:
    """Return the page of these kernels. It loads nothing; all text from the kernels is escaped."""
    listings = [make_listing(k) for k in kernels]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("weft.workbench.explain.inspect"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    texts = {name: _template(environment, f"page.{name}") for name in ("css", "js")}
    names = dict.fromkeys(f"{x.kernel.operator} {x.kernel.implementation}" for x in listings)
    title = f"{', '.join(names)} disassembled"
    # The page's security policy allows only the script with this hash.
    script = base64.b64encode(hashlib.sha256(texts["js"].encode()).digest()).decode()
    return environment.get_template("page.html.j2").render(
        title=title, listings=listings, facts=facts, keys=_keys, script_hash=script, **texts
    )


def _template(environment: jinja2.Environment, name: str) -> Markup:
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])


def _keys(listing: Listing, instruction: Instruction) -> str:
    """Return the page's keys of an instruction's source lines: file number and line number."""
    lines = ((listing.file_number(p), p.line) for p in instruction.locations)
    return " ".join(dict.fromkeys(f"{file}-{line}" for file, line in lines if file is not None))
