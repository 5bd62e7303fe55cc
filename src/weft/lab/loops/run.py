"""The loop study: check each variant, count its misses in a simulated cache, time it; the result is a record.

Only what was found right is timed. All variants of all programs are sampled round by round in random order,
as the points of the MLP study are. A sample is one call, or as many as last ``SAMPLE_US``; it meets the cache
as the call before left it. After the timing each output is compared once more.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch

from weft import machine
from weft.core import Interrupted, Log
from weft.lab.loops import addresses, counters, in_c
from weft.lab.loops.cache import CacheLevel, Misses, cache_levels, simulate
from weft.lab.loops.problem import NORMAL, Problem
from weft.lab.loops.variants import PROGRAMS, VARIANTS, Variant, units_of_work, variants
from weft.lab.study.measure import NOISY, sample_rounds
from weft.machine.clocks import Sampler
from weft.machine.load import measure as measure_load
from weft.workbench.calls.buffers import InputBuffers
from weft.workbench.timing.cpu import wait_until_idle
from weft.workbench.timing.gpu_clocks import Readings
from weft.workbench.timing.measure import timing_backend
from weft.workbench.timing.plan import Candidate, Plan, TimedCandidate, TimingBackend
from weft.workbench.timing.stats import Summary, summarise

FORMAT = 1
SECONDS, QUICK_SECONDS = 60.0, 2.0  # of sampling
EXPECTED_SECONDS, EXPECTED_QUICK_SECONDS = 110.0, 45.0  # of a whole study of the default sizes
SAMPLE_US = 200.0
# Rows of a and c in the simulated product. Its rows are as long as the timed product's, so that each access
# is in the same line of a cache; only the number of turns of the loop over i differs.
SIMULATED_ROWS, QUICK_ROWS = 32, 8
VECTORISED = "LLVM vectorises numba's interchange by itself"
NOT_QUICK = "not with --quick"
MissesByVariant = dict[tuple[str, str], Misses]


@dataclass(eq=False, kw_only=True)
class Entry:
    """A variant in one language: its call, or why there is none, and what was found out about it.

    ``skipped``: why it cannot run here. ``refused``: why it is wrong; such a variant is not timed, or its
    times are dropped. ``share`` is its error as a share of the bound.
    """

    variant: Variant
    language: str
    problem: Problem
    call: Callable[[], None] | None = None
    packed: bool | None = None
    skipped: str = ""
    refused: str = ""
    share: float | None = None
    repeats: int = 1
    summary: Summary | None = None
    counted: float | None = None

    @property
    def title(self) -> str:
        return f"{self.variant.program} {self.variant.name} in {self.language}"

    def is_right(self) -> bool:
        """Check the call at its size; keep the verdict, and the number of calls of a sample."""
        assert self.call is not None
        verdict = self.problem.check(self.call)
        self.share, self.refused = verdict.share, verdict.reason
        self.repeats = max(1, ceil(SAMPLE_US * 1e-6 / max(verdict.seconds, 1e-7)))
        return not verdict.reason


def run(sizes: Mapping[str, int], languages: Sequence[str], *, quick: bool, log: Log) -> dict[str, Any]:
    """Check, simulate and time the programs of these sizes; return the study as a record.

    Raises :class:`Interrupted` for a ``KeyboardInterrupt`` while it times, with the study of the rounds so
    far if there are enough.
    """
    load, levels = measure_load("cpu"), cache_levels()
    threads = machine.query("cpu").threads or 1
    problems = {name: Problem(name, size) for name, size in sizes.items()}
    interrupt = None
    with tempfile.TemporaryDirectory(prefix="weft-loops-") as folder:
        library, missing = _library(Path(folder), languages, log)
        entries = [
            _entry(variant, language, problems[name], library, missing, threads)
            for name in sizes
            for variant in variants(name)
            for language in languages
        ]
        right = _checked(entries, log)
        misses, not_simulated = _misses(sizes, levels, QUICK_ROWS if quick else SIMULATED_ROWS, log)
        try:
            _time(right, QUICK_SECONDS if quick else SECONDS, log)
        except Interrupted as error:
            if error.partial is None:
                raise
            interrupt = error
        skip_counting = NOT_QUICK if quick else "stopped before" if interrupt else ""
        not_counted = skip_counting or _count(right, library, log)
    load_after = measure_load("cpu")
    study = {
        "study": "loops",
        "format": FORMAT,
        "quick": quick,
        "device": "cpu",
        "threads": threads,
        "languages": list(languages),
        "compiler": None if library is None else _compiler_row(library),
        "caches": [asdict(level) | {"sets": level.sets} for level in levels],
        "not_simulated": not_simulated,
        "not_counted": not_counted,
        "programs": [_program_row(name, problems[name], misses, quick) for name in sizes],
        "rows": [_row(entry, entries) for entry in entries],
        "load": {"before": load.to_json(), "after": load_after.to_json()},
        "machine": machine.fingerprint("cpu"),
    }
    study["wrong"] = [f"{entry.title}: {entry.refused}" for entry in entries if entry.refused]
    if interrupt is not None:
        raise Interrupted(study) from interrupt
    return study


def _library(folder: Path, languages: Sequence[str], log: Log) -> tuple[in_c.Library | None, dict[str, str]]:
    """Compile programs.c; return it, and for each language that cannot run here the reason."""
    library, missing = None, {}
    if "c" in languages:
        log("compiling the variants in C")
        try:
            library = in_c.build(folder, in_c.SOURCE)
        except in_c.NoCompiler as error:
            missing["c"] = str(error)
    if "numba" in languages and (reason := _reason_without_numba()):
        missing["numba"] = reason
    return library, missing


def _reason_without_numba() -> str:
    try:
        import weft.backends.numba_jit  # noqa: F401 - whether it can be imported is the question
    except ImportError as error:
        return f"numba cannot be imported: {error}"
    return ""


def _entry(
    variant: Variant,
    language: str,
    problem: Problem,
    library: in_c.Library | None,
    missing: Mapping[str, str],
    threads: int,
) -> Entry:
    """Return a variant in a language with its call, or with the reason why it has none."""
    entry = Entry(variant=variant, language=language, problem=problem, skipped=missing.get(language, ""))
    if entry.skipped:
        return entry
    arrays = problem.arrays(variant)
    if language == "c":
        assert library is not None
        entry.call = library.call(variant, arrays, problem.shape, threads)
        return entry
    from weft.lab.loops import in_numba

    if in_numba.source(variant) is None:
        entry.skipped = VECTORISED
        return entry

    def call() -> None:
        jitted(*arrays, threads)

    jitted = in_numba.compiled(variant, threads)
    entry.call, entry.packed = call, in_numba.is_packed(jitted)
    return entry


def _checked(entries: Sequence[Entry], log: Log) -> list[Entry]:
    """Check every entry that has a call; return those that are right."""
    right = []
    for entry in entries:
        if entry.call is None:
            continue
        log(f"checking {entry.title}")
        if entry.is_right():
            right.append(entry)
    return right


# Misses


def _misses(
    sizes: Mapping[str, int], levels: tuple[CacheLevel, CacheLevel], rows: int, log: Log
) -> tuple[MissesByVariant, str]:
    """Simulate each order of accesses once; return the misses of every variant, or the reason for none."""
    if reason := _reason_without_numba():
        return {}, reason
    misses: MissesByVariant = {}
    chosen = [v for v in VARIANTS if v.program in sizes]
    for variant in sorted(chosen, key=lambda v: v.stream != v.name):
        key = variant.program, variant.stream
        if key not in misses:
            log(f"simulating the cache for {variant.program} {variant.name}")
            shape = PROGRAMS[variant.program].simulated_shape(sizes[variant.program], rows)
            misses[key] = simulate(addresses.stream(variant, shape), levels)
        misses[variant.program, variant.name] = misses[key]
    return misses, ""


def _count(entries: Sequence[Entry], library: in_c.Library | None, log: Log) -> str:
    """Count L1 misses of the variants in C by ``perf``; return why there are none, or nothing."""
    if library is None:
        return "no variant in C ran"
    if reason := counters.reason_without_counters():
        return reason
    for entry in entries:
        # The counted process has one thread, so that a parallel variant would be another program there.
        if entry.language == "c" and entry.variant.name != "parallelisation":
            log(f"counting the misses of {entry.title}")
            try:
                entry.counted = counters.l1_load_misses(library, entry.variant, entry.problem.shape[-1])
            except counters.NotCounted as error:
                return str(error)
    return ""


# Times


class _Sampler:
    """Samples of one entry; waits before each until threads of the call before have stopped spinning."""

    def __init__(self, backend: TimingBackend, entry: Entry) -> None:
        assert entry.call is not None
        call, repeats, output = entry.call, entry.repeats, torch.from_numpy(entry.problem.output)

        def calls() -> torch.Tensor:
            for _ in range(repeats):
                call()
            return output

        candidate = Candidate(name=entry.title, bind=lambda _: calls)
        self.repeats = repeats
        # Not flushed, and without buffers: the call owns its arrays, which all variants of a program share.
        self.runner: TimedCandidate = backend.prepare(
            candidate, [InputBuffers([])], lambda seed: InputBuffers([]), Plan(calls=1, flush=False)
        )

    def sample(self) -> float:
        """Return the us of one call."""
        wait_until_idle()
        return self.runner.sample() / self.repeats


def _time(entries: Sequence[Entry], seconds: float, log: Log) -> None:
    """Time the entries side by side; then compare each output once more.

    Raises :class:`Interrupted`; its ``partial`` is True if the summaries are there all the same.
    """
    if not entries:
        return
    problems = dict.fromkeys(entry.problem for entry in entries)
    for problem in problems:
        problem.fill(NORMAL)
    backend, interrupt = timing_backend("cpu"), None
    with backend.context():
        samplers = {entry: _Sampler(backend, entry) for entry in entries}
        try:
            samples, _ = sample_rounds(samplers, Readings(Sampler("cpu")), seconds, log)
        except Interrupted as error:
            if error.partial is None:
                raise
            interrupt, (samples, _) = error, error.partial
    for entry in entries:
        entry.summary = summarise(samples[entry])
    if interrupt is not None:
        raise Interrupted(True) from interrupt
    for entry in entries:
        assert entry.call is not None
        entry.problem.fill(NORMAL)
        entry.call()
        if reason := entry.problem.compare(NORMAL).reason:
            entry.refused, entry.summary = f"right before the timing and wrong after it: {reason}", None


# Record


def _compiler_row(library: in_c.Library) -> dict[str, Any]:
    return {"name": library.compiler, "version": library.version, "flags": list(library.flags)}


def _program_row(name: str, problem: Problem, misses: MissesByVariant, quick: bool) -> dict[str, Any]:
    """Return a program as plain data; ``misses`` are those of the whole simulated nest, by variant."""
    program = PROGRAMS[name]
    size = problem.shape[-1]
    simulated = program.simulated_shape(size, QUICK_ROWS if quick else SIMULATED_ROWS)
    return {
        "name": name,
        "formula": program.formula,
        "work": program.work,
        "size": size,
        "shape": list(problem.shape),
        "units": units_of_work(name, problem.shape),
        "simulated_shape": list(simulated),
        "simulated_units": units_of_work(name, simulated),
        "misses": {v: asdict(counts) for (p, v), counts in misses.items() if p == name},
    }


def _row(entry: Entry, entries: Sequence[Entry]) -> dict[str, Any]:
    """Return an entry as plain data; ``gain`` is the time of its base in the same language over its own."""
    variant, summary = entry.variant, entry.summary
    gain = None
    for other in entries:
        is_base = (other.variant.program, other.variant.name) == (variant.program, variant.base)
        if is_base and other.language == entry.language and other.summary and summary:
            gain = other.summary.median / summary.median
    row = {
        **{
            field: getattr(variant, field) for field in ("program", "name", "base", "change", "gpu", "kernel")
        },
        "stream": variant.stream,
        "language": entry.language,
        "share_of_bound": entry.share,
        "packed": entry.packed,
        "refused": entry.refused or None,
        "skipped": entry.skipped or None,
        "us": None,
        "gain": gain,
        "counted_l1": entry.counted,
    }
    if summary is not None:
        flags = ["noisy"] if summary.width > NOISY else []
        row |= {"us": summary.median, "interval": list(summary.interval), "minimum": summary.minimum}
        row |= {"samples": summary.n, "flags": flags}
    return row
