"""The bandwidth roof: bytes a second against bytes, for rows that only bytes can bind.

An operator that counts no FLOPs has no arithmetic intensity; its place under the roof is told by
the bytes it must move, and small cases are seen to fall away from the roof as launching outweighs
moving.
"""

from __future__ import annotations

from markupsafe import Markup

from weft.workbench.report import frame, svg
from weft.workbench.report.devices import DeviceRecords
from weft.workbench.report.frame import Plot
from weft.workbench.report.rows import Row
from weft.workbench.report.scales import Linear, Log, log_axis, unit


def bandwidth_roof(device: DeviceRecords) -> Plot | None:
    """The plot of every timed row without FLOPs; None where there is none."""
    rows = [r for r in device.timed if r.nbytes and not (r.flops and r.flops > 0)]
    if not rows:
        return None
    roofs = [("copy", device.roofs.copy), ("read", device.roofs.read)]
    levels = [v for _, v in roofs if v]
    x_axis = log_axis([r.nbytes for r in rows if r.nbytes], room=1.9)
    if x_axis.high / x_axis.low < 50:
        x_axis = Log(x_axis.low / 4, x_axis.high * 4)
    # A time that the clock did not believe sets no scale: its mark stands at the top's edge.
    honest = [v for r in rows if (v := frame.bandwidth(r)) and not (r.suspect and levels)]
    y_axis = Linear(1.2 * max(honest + levels))
    columns = {(x_axis.at(r.nbytes), r.operator) for r in rows if r.nbytes}
    drawn = Markup("").join(
        (
            frame.grid(x_axis, y_axis),
            *_roofs(roofs, y_axis, device.roofs.derived),
            *(frame.names(columns, top=True) if len({n for _, n in columns}) > 1 else ()),
            *(_mark(r, x_axis, y_axis) for r in rows),
        )
    )
    notes = frame.common_notes(rows) + ([frame.derived_note()] if device.roofs.derived else [])
    return Plot(
        picture=svg.tag(
            "svg", drawn, class_="plot roofline bytes", role="group", aria_label="Bandwidth roof"
        ),
        title="Bandwidth roof",
        across="bytes that must be moved, logarithmic",
        up="B/s reached",
        says="These operators are bound by bytes alone: the higher, the nearer to the measured "
        "bandwidth; small cases fall away from it as the launch outweighs the moving."
        + frame.nearest(rows, "the roof"),
        notes=tuple(notes),
    )


def _roofs(roofs: list[tuple[str, float | None]], y_axis: Linear, derived: bool) -> list[Markup]:
    """The levels, and their names over the upper one, at the left where cases are small."""
    known = sorted(((v, n) for n, v in roofs if v), reverse=True)
    found = []
    for value, name in known:
        y = 100 - y_axis.at(value)
        second = " second" if name == "read" else ""
        found.append(svg.layer(svg.path([(0, y), (100, y)], f"roof{second}")))
    if known:
        names = "bandwidth" if derived else ""
        words = " · ".join(f"{names or n} {unit(v, 'B/s')}" for v, n in reversed(known))
        y = 100 - y_axis.at(known[0][0])
        found.append(svg.label(words, x=0, y=y, dx=8, dy=-8, class_="roof"))
    return found


def _mark(row: Row, x_axis: Log, y_axis: Linear) -> Markup:
    speed = frame.bandwidth(row)
    assert row.nbytes is not None and speed is not None
    return frame.mark(row, x_axis.at(row.nbytes) + frame.lane(row), 100 - y_axis.at(speed))
