"""SVG elements as nested calls, all escaped, with positions in percent so that a plot fits any width.

Text and markers keep their size while the plot stretches: each marker is a nested ``<svg>`` at a position in
percent. Lines are in a layer with a view box of 100 by 100, whose strokes do not scale.
"""

from __future__ import annotations

from markupsafe import Markup, escape

from weft.workbench.report.device_records import OTHER

# Each backend has a shape as well as a colour, so that no information is in the colour alone.
SHAPES = {
    "eager": "M-4.6,0a4.6,4.6 0 1,0 9.2,0a4.6,4.6 0 1,0 -9.2,0z",
    "torch": "M-4.2,-4.2h8.4v8.4h-8.4z",
    "compile": "M0,-5.8L5.8,0L0,5.8L-5.8,0z",
    "triton": "M0,-5.6L5.4,4.2L-5.4,4.2z",
    "cuda": "M0,5.6L5.4,-4.2L-5.4,-4.2z",
    "numba": "M-2.6,-4.8H2.6L5.2,0L2.6,4.8H-2.6L-5.2,0z",
    OTHER: "M-5,-1.6h3.4v-3.4h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4z",
}


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Return an element. ``class_`` is class, ``_`` in names is ``-``, and None omits an attribute."""
    rendered = Markup("").join(
        Markup(' {}="{}"').format(Markup(key.rstrip("_").replace("_", "-")), _short_float(value))
        for key, value in attributes.items()
        if value is not None
    )
    body = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), rendered, body)


def _short_float(value: object) -> object:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def percent(value: float) -> str:
    return f"{value:.3f}%"  # a thousandth of a percent is below one pixel


def marker(backend: str, tip: str, *, x: float, y: float, classes: str = "") -> Markup:
    """Return a backend's marker at a position in percent; ``tip`` is its label."""
    return tag(
        "svg",
        tag("title", tip),
        tag("path", d=SHAPES[backend]),
        x=percent(x),
        y=percent(y),
        class_=" ".join(("mark", f"b-{backend}", *classes.split())),
        data_backend=backend,
        role="img",
        aria_label=tip,
        tabindex=-1,  # the page's script makes one mark of each plot a tab stop
    )


def swatch(backend: str) -> Markup:
    """Return the backend's marker alone, for a legend."""
    shape = tag("path", d=SHAPES[backend])
    return tag("svg", shape, class_=f"swatch b-{backend}", viewBox="-7 -7 14 14", aria_hidden="true")


def layer(*children: object) -> Markup:
    """Return a layer with coordinates 0 to 100 on both sides, stretched over the plot."""
    return tag(
        "svg",
        *children,
        viewBox="0 0 100 100",
        preserveAspectRatio="none",  # stretch both sides independently to fill the plot
        width="100%",
        height="100%",
        class_="layer",
        aria_hidden="true",
    )


def path(points: list[tuple[float, float]], class_: str, close: bool = False) -> Markup:
    """Return a path through ``points`` in a layer's coordinates (y downwards)."""
    d = "M" + "L".join(f"{x:.3f},{y:.3f}" for x, y in points) + ("z" if close else "")
    return tag("path", d=d, class_=class_, vector_effect="non-scaling-stroke")


def label(text: str, *, x: float, y: float, dx: float = 0, dy: float = 0, class_: str) -> Markup:
    """Return text at a position in percent, moved by ``dx`` and ``dy`` pixels."""
    return tag("text", text, x=percent(x), y=percent(y), dx=dx, dy=dy, class_=class_)
