"""A measured hierarchy as text: each curve's plateaus and breaks, then the single figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Said = Mapping[str, Any]
READINGS = {"leaves": "leaves the plateau at", "holds": "holds at most"}


def size(nbytes: float) -> str:
    """Bytes in binary units, three digits that count.

    >>> size(4096), size(233472), size(62914560), size(1.5 * 2**30), size(1023 * 2**20)
    ('4 KiB', '228 KiB', '60 MiB', '1.5 GiB', '1023 MiB')
    """
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= 0.9995 * scale:
            count = nbytes / scale
            return f"{count:.3g} {unit}" if count < 999.5 else f"{count:.0f} {unit}"
    return f"{nbytes:.0f} B"


def quantity(value: float, unit: str) -> str:
    """A value in its unit, three digits; bytes in binary units, bytes a second in GB/s.

    >>> quantity(4.274e12, "B/s"), quantity(37.04, "cycles"), quantity(0.5, "us")
    ('4,274 GB/s', '37 cycles', '0.5 us')
    """
    if unit == "B":
        return size(value)
    if unit == "B/s":
        return f"{value / 1e9:,.4g} GB/s" if value < 1e12 else f"{value / 1e9:,.0f} GB/s"
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def off(share: float) -> str:
    """How far from what was known: ``-3.1 %``, ``+4.0 %``."""
    return f"{100 * share:+.1f} %"


def lines(said: Said) -> Iterator[str]:
    """The whole of it, for a terminal: one paragraph a curve, and one of figures."""
    known = ", ".join(f"{level} {size(n)}" for level, n in said["known"].items())
    yield f"memory hierarchy, in {said['seconds']:.0f} s; known sizes: {known or 'none'}"
    for one in said["series"]:
        yield ""
        yield f"{one['kind']}, {one['label']}"
        yield from (f"  {line}" for line in plateaus(one))
        yield from (f"  {line}" for line in held(one))
    yield ""
    for figure in said["figures"]:
        against = ""
        if "off" in figure:
            expected = quantity(figure["expected"], figure["unit"])
            against = f" ({off(figure['off'])} against {expected}, {figure['by']})"
        yield f"{figure['label']}: {quantity(figure['value'], figure['unit'])}{against}"


def plateaus(one: Said) -> Iterator[str]:
    """A line a plateau: what it costs and over which sizes, and where it breaks."""
    if not one["plateaus"]:
        yield "no plateau: no stretch of sizes costs the same"
    for number, flat in enumerate(one["plateaus"]):
        value = quantity(flat["value"], one["unit"])
        ns = f" ({flat['ns']:.3g} ns)" if "ns" in flat else ""
        told = f"{value}{ns} from {size(flat['first'])} to {size(flat['last'])}"
        if number < len(one["breaks"]):
            end = one["breaks"][number]
            told += f"; breaks at {size(end['leaves'])}, holds at most {size(end['holds'])}"
        yield told


def held(one: Said) -> Iterator[str]:
    """A line a level whose known size the curve may show: by how much each reading is off."""
    for found in one["held"]:
        level = f"{found['level']}, known as {size(found['known'])}"
        if "leaves" not in found:
            yield f"{level}: no break near it"
            continue
        told = ", ".join(
            f"{word} {size(found[reading])} ({off(found[f'{reading}_off'])})"
            for reading, word in READINGS.items()
        )
        verdict = f"within 10 %: {' and '.join(found['within']) or 'neither'}"
        yield f"{level}: {told}; {verdict}"
