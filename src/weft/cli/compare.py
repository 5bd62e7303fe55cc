"""``weft compare``: compare records of two sides; report what became faster or slower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import ending, output, progress
from weft.cli.options import Csv, Json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.core import Record
    from weft.workbench.compare.noise import Noise
    from weft.workbench.compare.text import ComparisonReport
    from weft.workbench.compare.verdict import NoiseByMachine

EPILOG = """Examples:
  weft compare before.jsonl after.jsonl
  weft compare records.jsonl --commits 8043fa7 bc094df --markdown
  weft compare softmax --measure-noise --pairs 3

Verdicts, and use in CI: weft help regressions"""


def compare(
    records: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE", help="Record files of before and after; a single file may contain both"
        ),
    ] = None,
    commits: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="OLD NEW", help="Two commits among the records, by their first digits"),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION",
            help="Smallest difference that counts, such as 0.02 for 2 % [default: the noise]",
        ),
    ] = None,
    fail_on: Annotated[
        str,
        typer.Option(
            metavar="slower|missing|ambiguous",
            help="Exit 1 on: slower (or failing); missing (also slower); ambiguous (also both)",
        ),
    ] = "missing",
    noise: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measured noise [default: the file of this machine, if any]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compare records of different machines")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown for a pull request")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="List unchanged and not measured points as well")
    ] = False,
    as_json: Json = False,
    as_csv: Csv = False,
    measure_noise: Annotated[
        bool,
        typer.Option("--measure-noise", help="Measure and save this machine's noise; FILE names operators"),
    ] = False,
    pairs: Annotated[
        int, typer.Option(metavar="N", help="With --measure-noise: number of pairs of runs")
    ] = 3,
) -> None:
    """Report faster, slower, same or inconclusive for everything that both sides have measured.

    "Same" says that a difference of the threshold (5 % without one) would have been seen. JSON output and
    --fail-on call an inconclusive point "ambiguous".

    Exit 0: nothing is slower or broken; 1: something is; 2: invalid arguments.
    """
    from weft.workbench.compare import text, verdict

    output.only_one_format(json=as_json, csv=as_csv, markdown=markdown)
    if measure_noise:
        _measure_noise(records or [], pairs, noise, as_json)
        return
    watch = ending.Stopwatch()
    verdict.failures([], fail_on)  # reject an invalid --fail-on before reading the files
    comparison = _compare(records or [], commits, threshold, fail_on, noise, force)
    if as_json:
        print(json.dumps(comparison.to_json()))
    elif markdown:
        print(text.markdown(comparison))
    elif as_csv:
        output.print_csv(text.full_table(comparison.comparisons))
    else:
        output.show_table(text.terminal_table(comparison.comparisons, everything), options=("csv", "json"))
    _log_notes(comparison)
    verdict_word = f"failed: {len(comparison.failed)} of" if comparison.failed else "passed:"
    points = ending.count_text(len(comparison.comparisons), "point")
    line = f"{verdict_word} {points}: {text.counts_line(comparison.comparisons)} ({watch})"
    ending.print_verdict(line, to_stderr=as_json or markdown or as_csv)
    if comparison.failed:
        raise typer.Exit(1)


def _compare(
    files: Sequence[str],
    commits: tuple[str, str] | None,
    threshold: float | None,
    fail_on: str,
    noise: Path | None,
    force: bool,
) -> ComparisonReport:
    """Read the records and compare; raise :class:`WeftError` if the sides have no point in common."""
    from weft.core import WeftError
    from weft.workbench.compare import verdict
    from weft.workbench.compare.sides import split_records
    from weft.workbench.compare.text import ComparisonReport

    if not files:
        raise WeftError(
            "nothing to compare",
            expected="one or two files of records",
            got="none",
            hint="write them with weft bench --save FILE",
        )
    a, b = split_records([_read(Path(f)) for f in files], commits)
    noises = _noises([*a, *b], noise, force)
    comparisons = verdict.compare(a, b, threshold=threshold, force=force, noises=noises)
    failed = verdict.failures(comparisons, fail_on)
    points = [{(r.operator, r.implementation, r.case, r.direction) for r in side} for side in (a, b)]
    if not failed and points[0].isdisjoint(points[1]):
        raise WeftError(
            "the two sides have nothing in common",
            expected="the same operator, implementation, case and direction on both",
            got=f"{len(a)} records in A and {len(b)} in B of other things",
        )
    return ComparisonReport(
        baseline=a,
        candidate=b,
        comparisons=comparisons,
        failed=failed,
        noises=noises,
        threshold=threshold,
        fail_on=fail_on,
        noise_file=str(noise or ""),
    )


def _read(path: Path) -> list[Record]:
    from weft.core import record

    records, torn = record.read(path)
    if torn:
        output.log(f"{path}: {torn} torn line(s) skipped")
    return records


def _noises(records: Sequence[Record], path: Path | None, force: bool) -> NoiseByMachine:
    """Return the noise of each machine among the records: the file's, or the one measured here."""
    from weft.core import WeftError
    from weft.workbench.compare import noise

    machines = {noise.machine_key(r.machine): r.machine for r in records}
    if path is None:
        measured = {key: noise.load_cached(machine) for key, machine in machines.items()}
        return {key: n for key, n in measured.items() if n is not None}
    loaded = noise.load(path)
    origin = noise.machine_key(loaded.machine)
    if origin not in machines and not force:
        raise WeftError(
            "the noise was measured on another machine",
            expected=" or ".join(" ".join(filter(None, key)) for key in machines),
            got=" ".join(filter(None, origin)),
            hint="measure it there with weft compare --measure-noise --noise FILE, or use --force",
        )
    return dict.fromkeys(machines, loaded) if force else {origin: loaded}


def _measure_noise(arguments: Sequence[str], pairs: int, path: Path | None, as_json: bool) -> None:
    """Measure the noise between runs of the same code, save it and print it."""
    from weft.workbench.compare import noise

    watch, file = ending.Stopwatch(), None
    with progress.stoppable() as stop, progress.Progress(every_line=True) as status:
        measured: Noise | None = noise.measure(arguments, pairs=pairs, log=status)
    if stop:
        measured = stop.partial
    elif measured is not None:
        file = path or noise.path_for(measured.machine)
        noise.save(file, measured)
    if as_json and measured is None:
        print(json.dumps(stop.to_json()))
    elif as_json and measured is not None:
        report = {
            "machine": measured.machine,
            "usual": measured.usual,
            "wide": measured.wide,
            "runs": measured.runs,
            "path": str(file) if file else None,
            "points": [vars(s) | {"share": s.share} for s in measured.spreads],
        }
        print(json.dumps(report | stop.to_json()))
    elif measured is not None:
        _show_noise(measured)
    points = ending.count_text(len(measured.spreads) if measured else 0, "point")
    if stop:
        # Few runs agree by chance: their noise would make later comparisons too sure.
        line = f"stopped: the noise of {points} is known ({watch}); nothing is saved"
    else:
        line = f"measured: the noise of {points} ({watch}); saved in {file}"
    ending.print_verdict(line, to_stderr=as_json)
    if stop:
        raise typer.Exit(stop.exit_code)


def _show_noise(noise: Noise) -> None:
    print(f"{noise.machine.get('device')}: {noise.runs} runs of each")
    for s in sorted(noise.spreads, key=lambda s: -s.share):
        print(f"{s.share:7.2%}  {s.operator} {s.implementation} {s.case} {s.direction}")
    print(f"{noise.usual:7.2%}  typical; the minimum for any point measured here")
    print(f"{noise.wide:7.2%}  for points that were not measured")


def _log_notes(comparison: ComparisonReport) -> None:
    """Print the sides, what differs between them, and the noise to stderr."""
    from weft.workbench.compare import verdict
    from weft.workbench.compare.sides import commits, differences
    from weft.workbench.compare.text import REMEASURE, noise_notes, side_rows

    for name, revision, when, number in side_rows(comparison):
        output.log(f"{name}: {revision}, {when}, {number} records")
    for name, records in comparison.sides:
        if len(commits(records)) > 1:
            output.log(f"note: {name} pools several commits; --commits selects one")
    for note in (*differences(comparison.baseline, comparison.candidate), *noise_notes(comparison)):
        output.log(f"note: {note}")
    if verdict.counts(comparison.comparisons)["ambiguous"]:
        output.log(f"note: {REMEASURE}")
    missing = sum(c.missing for c in comparison.failed)
    if missing and missing == len(comparison.failed):
        output.log(f"hint: {missing} missing, nothing slower; --fail-on slower ignores missing points")
