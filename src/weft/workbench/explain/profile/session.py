"""Profile from a subject to its files: check, measure by three instruments, fold the trace, write."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft import machine
from weft.core import Log
from weft.core.record import PASS
from weft.workbench.explain.profile import agreement, instruments, output_files, rows
from weft.workbench.explain.profile.agreement import Agreement, Root
from weft.workbench.explain.profile.instruments import Reading, Schedule, TracedCycle
from weft.workbench.explain.profile.rows import Row
from weft.workbench.explain.profile.stacks import DEVICE, Folded, fold, without_own_frames
from weft.workbench.explain.profile.workload import Subject, Workload, check_subject, prepare
from weft.workbench.timing.measure import timing_backend
from weft.workbench.timing.plan import TimingBackend

FORMAT = "weft profile 1"
MAX_ATTEMPTS = 3  # complete measurements before the instruments are reported to disagree


class CheckFailed(Exception):
    """The implementation failed its check at that case; the message has the reason."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Readings of the instruments, of all attempts together, and the trace of the last attempt.

    ``folded`` is what the flame graph draws: that trace, or ``with_frames``, a cycle of its own that has
    Python frames.
    """

    readings: tuple[Reading, ...]
    traced: TracedCycle
    folded: Folded
    attempts: int
    with_frames: TracedCycle | None = None

    @property
    def drawn_cycle(self) -> TracedCycle:
        """Cycle that the flame graph draws."""
        return self.with_frames or self.traced

    @property
    def agreement(self) -> Agreement:
        return Agreement(readings=self.readings)

    @property
    def root(self) -> Root:
        """Root and wall time of the thread that ran the steps; all other lanes are as wide."""
        return Root(root_us=self.folded.root_us, wall_us=sum(self.drawn_cycle.walls_us))


def run(
    subject: Subject, schedule: Schedule, out: Path, log: Log, *, python_frames: bool = False
) -> dict[str, Any]:
    """Profile a subject into a folder and return the content of ``profile.json``.

    With ``python_frames`` trace and flame graph come from one more cycle, which has Python's functions too.
    Raises :class:`CheckFailed` if it fails its check: only correct implementations are measured.
    """
    title = f"{subject.operator.name} {subject.implementation.name} {subject.case.name}"
    log(f"checking {title} {subject.direction}")
    verdict, grad = check_subject(subject)
    if verdict.status != PASS:
        raise CheckFailed(f"{title} {subject.direction}: {verdict.reason}")
    output_files.prepare_folder(out)
    backend = timing_backend(subject.device)
    with backend.context():
        workload = prepare(subject, grad, backend)
        log(f"a step is {workload.calls} calls over {workload.inputs} distinct inputs")
        measurement = measure(workload, backend, schedule, out, log)
        if python_frames:
            log("recording Python frames")
            measurement = _with_frames(measurement, workload, schedule, out)
    return _write(subject, schedule, workload, measurement, out, log)


def measure(
    workload: Workload, backend: TimingBackend, schedule: Schedule, out: Path, log: Log
) -> Measurement:
    """Measure by one instrument after another, and repeat up to three times while they disagree.

    Other work on the machine lengthens steps for a while; a later attempt may be free of it.
    """
    readings: list[Reading] = []
    for attempt in range(1, MAX_ATTEMPTS + 1):
        log(f"measuring, {attempt} of at most {MAX_ATTEMPTS} times")
        clock = instruments.measure_by_clock(workload, backend, schedule)
        autograd = instruments.measure_by_autograd_profiler(workload, schedule)
        torch, traced = instruments.measure_by_torch_profiler(workload, schedule, out / output_files.TRACE)
        latest = [clock, autograd, torch]
        # Samples of all attempts are kept: the fastest step of any attempt is the least disturbed one.
        readings = [a + b for a, b in zip(readings, latest, strict=True)] if readings else latest
        measurement = Measurement(
            readings=tuple(readings), traced=traced, folded=fold(traced.trace), attempts=attempt
        )
        if measurement.agreement.good and measurement.root.good:
            break
    return measurement


def _with_frames(measurement: Measurement, workload: Workload, schedule: Schedule, out: Path) -> Measurement:
    """Return the measurement with the trace of one more cycle, in which Python's functions are recorded.

    The instruments' times come from the other cycles, since recording slows every call of a function.
    """
    cycle = replace(schedule, repeat=1)
    _, traced = instruments.measure_by_torch_profiler(
        workload, cycle, out / output_files.TRACE, python_frames=True
    )
    trace = without_own_frames(traced.trace)
    return replace(measurement, with_frames=replace(traced, trace=trace), folded=fold(trace))


def flags(measurement: Measurement) -> list[str]:
    """Return the faults of a measurement, one line each."""
    why = "is another profiler at work, or CUPTI not available?"
    lines = [f"unseen: {name} saw nothing run; {why}" for name in measurement.agreement.blind]
    if not lines and not measurement.agreement.good:
        spread, limit = measurement.agreement.spread, agreement.LIMIT
        lines.append(f"disagree: the instruments differ by {spread:.1%}, over {limit:.0%}")
    if not measurement.root.good:
        gap, limit = measurement.root.gap, agreement.ROOT_LIMIT
        lines.append(f"root: it differs from the wall time by {gap:+.1%}, over {limit:.0%}")
    return lines


def _write(
    subject: Subject,
    schedule: Schedule,
    workload: Workload,
    measurement: Measurement,
    out: Path,
    log: Log,
) -> dict[str, Any]:
    """Write the files of a profile and return its record."""
    trace, folded = measurement.drawn_cycle.trace, measurement.folded
    gpu = subject.device == "cuda"
    # The table is of the cycle without Python frames, whose self times the recording has not changed.
    plain = measurement.traced.trace
    if gpu:
        table = rows.on_device(plain, subject.implementation)
    else:
        table = rows.on_host(plain, fold(plain) if measurement.with_frames else folded)
    names = (subject.operator.name, subject.implementation.name, subject.case.name)
    title = " ".join((*names, subject.direction))
    output_files.write_trace(out, trace)
    stack_files = output_files.write_stacks(out, folded)
    files = [output_files.TRACE, *stack_files, output_files.FLAME, output_files.RECORD]
    output_files.write_flame_graph(out, folded, title, describe(folded, table))
    missing = output_files.write_tensorboard(out, "-".join(names), measurement.readings, table)
    if missing:
        log(missing)
    record = {
        "format": FORMAT,
        "operator": names[0],
        "implementation": names[1],
        "backend": subject.implementation.backend,
        "case": names[2],
        "direction": subject.direction,
        "device": subject.device,
        "schedule": asdict(schedule),
        "calls_a_step": workload.calls,
        "distinct_inputs": workload.inputs,
        "cold": workload.cold,
        "tries": measurement.attempts,
        "python_frames": measurement.with_frames is not None,
        "instruments": [_reading(r, measurement.agreement, gpu) for r in measurement.readings],
        "agreement": measurement.agreement.to_json(),
        "root": measurement.root.to_json(),
        "rows": [row.to_json() for row in table],
        "flags": flags(measurement),
        "files": [*files, f"{output_files.TENSORBOARD}/"],
        "not_written": [missing] if missing else [],
        "machine": machine.fingerprint(subject.device),
    }
    output_files.write_record(out, record)
    return record


def _reading(reading: Reading, comparison: Agreement, gpu: bool) -> dict[str, Any]:
    """Return a reading as plain data; ``overhead_us`` is the wall time that the instrument adds to a call."""
    without_profiler = comparison.readings[0]
    return {
        "instrument": reading.instrument,
        "measures": "device time" if gpu else "wall time",
        "us": reading.fastest,
        "against_clock": comparison.ratio(reading) - 1,
        "median_us": reading.median,
        "wall_us": reading.wall,
        "overhead_us": reading.wall - without_profiler.wall,
        "samples_us": list(reading.samples),
        "walls_us": list(reading.walls),
        "beside_us": list(reading.reference),
        "wall_median_us": statistics.median(reading.walls),
    }


def describe(folded: Folded, table: list[Row]) -> str:
    """Return one or two sentences that say what the flame graph shows."""
    if not table:
        return "Nothing that has a name ran: all of the time is in no operator."
    longest = max(table, key=lambda row: row.us)
    device = next((x for x in folded.lanes if x.kind == DEVICE), None)
    if device is None:
        return (
            f"Widths are wall time on the host. Look for the widest frame with nothing beneath it: "
            f"{longest.short} itself takes {longest.share:.0%} of the time."
        )
    return (
        f"Widths are wall time. In the lane of {device.name}, {longest.short} takes {longest.share:.0%} of "
        f"the time of all kernels. Where (GPU idle) is wide, the host's lane above it shows the reason."
    )
