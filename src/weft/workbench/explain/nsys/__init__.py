"""Timeline of calls by Nsight Systems: kernels, gaps, launch latency, copies and NVTX ranges.

``process`` runs nsys over ``target`` and exports its report; ``export`` reads the export, anywhere;
``summary`` computes its numbers, ``text`` formats them, and ``timeline`` turns it into a trace and a flame
graph.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.core import Log, WeftError
from weft.workbench.explain.ncu import call_job
from weft.workbench.explain.nsys import process, timeline
from weft.workbench.explain.nsys.export import Export, load
from weft.workbench.explain.nsys.summary import Summary, summarise

__all__ = ["load", "profile", "summarise", "write"]

RECORD = "nsys.json"


def profile(
    *,
    operator: str,
    implementation: str,
    case: str,
    direction: str,
    files: Sequence[str],
    out: Path,
    log: Log,
) -> Export:
    """Trace calls of an implementation by nsys into the folder ``out``, and return what the export has.

    ``files`` are external ``.py`` or ``.cu`` files, which only the traced process reads. Raises
    :class:`WeftError` for an unknown name, if nsys is not installed, and if the call fails.
    """
    # PyTorch is imported only here: the traced process decides first what is interpreted.
    from weft.workbench.explain.profile import output_files

    job = call_job(operator, implementation, case, direction, files)
    program = process.require()
    output_files.prepare_folder(out)
    return load(process.trace(program, job, out, log))


def write(export: Export, summary: Summary, out: Path, title: str) -> list[str]:
    """Write the record, and the trace with its flame graph if anything has a duration; return their names."""
    from weft.workbench.explain.profile import output_files, stacks

    output_files.prepare_folder(out)
    (out / RECORD).write_text(json.dumps(summary.to_json(), indent=1) + "\n")
    trace: dict[str, Any] = timeline.chrome_trace(export)
    try:
        folded = stacks.fold(trace)
    except WeftError:
        return [RECORD]  # an export without events, whose summary says so in its notes
    output_files.write_trace(out, trace)
    output_files.write_flame_graph(out, folded, title, _description(summary))
    names = [output_files.TRACE, *output_files.write_stacks(out, folded), output_files.FLAME]
    return [RECORD, *names]


def _description(summary: Summary) -> str:
    if not summary.kernels:
        return "Widths are wall time. No kernel is in this trace."
    longest, device = summary.kernels[0], summary.devices[0]
    return (
        f"Widths are wall time. {longest.short} takes {longest.share:.0%} of the time of all kernels. GPU "
        f"{device.device} is busy for {device.busy:.0%} of the time between its first and its last work."
    )
