"""A profile from names to files: check, measure by three instruments in turn, fold, write."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft import machine
from weft.core.record import PASS
from weft.workbench.clock import stand_for
from weft.workbench.plan import Stand
from weft.workbench.profile import agreement, artefacts, instruments, rows
from weft.workbench.profile.agreement import Agreement, Root
from weft.workbench.profile.instruments import Reading, Traced
from weft.workbench.profile.rows import Row
from weft.workbench.profile.schedule import Schedule
from weft.workbench.profile.stacks import DEVICE, Folded, fold
from weft.workbench.profile.work import Subject, Work, checked, prepare

FORMAT = "weft profile 1"
TRIES = 3  # times that all is measured before the instruments are said to differ
Say = Callable[[str], None]


class Failed(Exception):
    """The implementation failed its check at that case; the message says how."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the instruments said, all tries together, and the last one's trace."""

    readings: tuple[Reading, ...]
    traced: Traced
    folded: Folded
    tries: int

    @property
    def agreement(self) -> Agreement:
        return Agreement(readings=self.readings)

    @property
    def root(self) -> Root:
        """Both of them without a GPU's or a thread's other lanes, which are as wide."""
        return Root(root_us=self.folded.root_us, wall_us=sum(self.traced.walls_us))


def run(subject: Subject, schedule: Schedule, out: Path, say: Say) -> dict[str, Any]:
    """Profile a subject into a folder, and return what ``profile.json`` holds.

    Raises :class:`Failed` where it does not pass its check: nothing is measured that is wrong.
    """
    title = f"{subject.operator.name} {subject.implementation.name} {subject.case.name}"
    say(f"checking {title} {subject.direction}")
    verdict, grad = checked(subject)
    if verdict.status != PASS:
        raise Failed(f"{title} {subject.direction}: {verdict.reason}")
    artefacts.folder(out)
    stand = stand_for(subject.device)
    with stand.context():
        work = prepare(subject, grad, stand)
        say(f"a step is {work.calls} calls over {work.inputs} distinct inputs")
        measured = measure(work, stand, schedule, out, say)
    return _written(subject, schedule, work, measured, out, say)


def measure(work: Work, stand: Stand, schedule: Schedule, out: Path, say: Say) -> Measured:
    """The instruments one after another, and again, three times at most, while they differ: other
    work on the machine makes steps longer, and goes away."""
    readings: list[Reading] = []
    for attempt in range(1, TRIES + 1):
        say(f"measuring, {attempt} of at most {TRIES} times")
        clock = instruments.by_clock(work, stand, schedule)
        autograd = instruments.by_autograd_profiler(work, schedule)
        torch, traced = instruments.by_torch_profiler(work, schedule, out / artefacts.TRACE)
        now = [clock, autograd, torch]
        pairs = zip(readings, now, strict=True)
        readings = [a.with_more(b) for a, b in pairs] if readings else now
        folded = fold(traced.trace)
        found = Measured(
            readings=tuple(readings),
            traced=traced,
            folded=folded,
            tries=attempt,
        )
        if found.agreement.good and found.root.good:
            break
    return found


def flags(found: Measured) -> list[str]:
    """What went wrong, one line each; none where all is well."""
    why = "is another profiler at work, or CUPTI not to be had?"
    told = [f"unseen: {name} saw nothing run; {why}" for name in found.agreement.blind]
    if not told and not found.agreement.good:
        spread, limit = found.agreement.spread, agreement.LIMIT
        told.append(f"disagree: the instruments differ by {spread:.1%}, over {limit:.0%}")
    if not found.root.good:
        gap, limit = found.root.gap, agreement.ROOT_LIMIT
        told.append(f"root: it differs from the wall time by {gap:+.1%}, over {limit:.0%}")
    return told


def _written(
    subject: Subject, schedule: Schedule, work: Work, found: Measured, out: Path, say: Say
) -> dict[str, Any]:
    trace, folded = found.traced.trace, found.folded
    gpu = subject.device == "cuda"
    ran = rows.on_device(trace) if gpu else rows.on_host(trace, folded)
    names = (subject.operator.name, subject.implementation.name, subject.case.name)
    title = " ".join((*names, subject.direction))
    artefacts.trace(out, trace)
    files = [artefacts.TRACE, *artefacts.stacks(out, folded), artefacts.FLAME, artefacts.RECORD]
    artefacts.picture(out, folded, title, sees(folded, ran))
    missing = artefacts.tensorboard(out, "-".join(names), found.readings, ran)
    if missing:
        say(missing)
    told = {
        "format": FORMAT,
        "operator": names[0],
        "implementation": names[1],
        "backend": subject.implementation.backend,
        "case": names[2],
        "direction": subject.direction,
        "device": subject.device,
        "schedule": asdict(schedule),
        "calls_a_step": work.calls,
        "distinct_inputs": work.inputs,
        "cold": work.cold,
        "tries": found.tries,
        "instruments": [_reading(r, found.agreement, gpu) for r in found.readings],
        "agreement": found.agreement.to_json(),
        "root": found.root.to_json(),
        "rows": [row.to_json() for row in ran],
        "flags": flags(found),
        "files": [*files, f"{artefacts.TENSORBOARD}/"],
        "not_written": [missing] if missing else [],
        "machine": machine.fingerprint(subject.device),
    }
    artefacts.record(out, told)
    return told


def _reading(one: Reading, agreed: Agreement, gpu: bool) -> dict[str, Any]:
    """``overhead_us``: what the instrument adds to a call on the wall, against none looking on."""
    first = agreed.readings[0]
    return {
        "instrument": one.instrument,
        "measures": "device time" if gpu else "wall time",
        "us": one.least,
        "against_clock": agreed.ratio(one) - 1,
        "median_us": one.median,
        "wall_us": one.wall,
        "overhead_us": one.wall - first.wall,
        "samples_us": list(one.samples),
        "walls_us": list(one.walls),
        "beside_us": list(one.beside),
        "wall_median_us": statistics.median(one.walls),
    }


def sees(folded: Folded, ran: list[Row]) -> str:
    """What to see in the flame graph, in one or two sentences."""
    if not ran:
        return "Nothing that has a name ran: all of the time is in no operator."
    most = max(ran, key=lambda row: row.us)
    device = next((x for x in folded.lanes if x.kind == DEVICE), None)
    if device is None:
        return (
            f"Widths are wall time on the host. Look for the widest frame with nothing beneath it: "
            f"{most.short} holds {most.share:.0%} of the time itself."
        )
    return (
        f"Widths are wall time. In {device.name}'s lane {most.short} holds {most.share:.0%} of the "
        f"time of all kernels; where (GPU idle) is wide there, look above it, in the host's lane, "
        f"for what kept it waiting."
    )
