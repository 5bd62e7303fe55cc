"""A/A noise: how far two runs of the same thing lie apart on this machine, measured and kept.

Each run is a fresh process, since pages, addresses and tuning differ from process to process and
not within one. With m the medians of a point's runs, its spread is max m / min m - 1.
"""

from __future__ import annotations

import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.core import Record, WeftError, record
from weft.machine.ceilings import cache_folder
from weft.machine.keep import write_json

# Between two runs of the same thing a median moves by more than its interval says: other pages,
# another temperature. Smaller differences than these are never called one where nothing was
# measured.
NOISE = {"cuda": 0.01, "cpu": 0.05}
# The clock stops sampling once a median is known within half a percent, so that runs which happened
# to agree better than this say nothing about the next.
LEAST = 0.005
PAIRS = 3
FORMAT = 1

Identity = tuple[str, ...]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The medians (us) that runs of the same thing gave at one point."""

    operator: str
    implementation: str
    case: str
    direction: str
    medians: tuple[float, ...]

    @property
    def share(self) -> float:
        """How far they lie apart, as a share of the least."""
        return max(self.medians) / min(self.medians) - 1


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What was measured on one machine: its fingerprint (date and commit in it), how many runs,
    and what `weft bench` was called with."""

    machine: Mapping[str, Any]
    runs: int
    arguments: tuple[str, ...]
    spreads: tuple[Spread, ...]

    @property
    def usual(self) -> float:
        """The median spread over all points."""
        return max(LEAST, statistics.median(s.share for s in self.spreads))

    @property
    def wide(self) -> float:
        """What nine tenths of the points stay within; for points that were not measured."""
        shares = sorted(s.share for s in self.spreads)
        return max(LEAST, shares[min(len(shares) - 1, int(0.9 * len(shares)))])

    def of(self, key: Sequence[str], pooled: int = 1) -> float:
        """The noise of (operator, implementation, case, direction): its own spread, never below
        the usual one, which a handful of runs may miss by luck. Of ``pooled`` runs a side the
        mean moves by the root of that less."""
        own = [s.share for s in self.spreads if _key(s) == tuple(key)]
        share = max(self.usual, *own) if own else self.wide
        return max(LEAST, share / math.sqrt(pooled))


def _key(s: Spread) -> tuple[str, ...]:
    return s.operator, s.implementation, s.case, s.direction


def identity(machine: Mapping[str, Any]) -> Identity:
    """What makes two machines' noise one: kind, device, architecture, units and power limit."""
    words = ("kind", "device", "arch", "units", "power_limit_w")
    return tuple(str(machine.get(word) or "") for word in words)


def path_for(machine: Mapping[str, Any]) -> Path:
    """The file of a machine, by its fingerprint, in Weft's cache folder."""
    slug = re.sub(r"[^a-z0-9]+", "-", " ".join(identity(machine)).lower()).strip("-")
    return cache_folder() / "noise" / f"{slug}.json"


def load(path: Path) -> Noise:
    """What :func:`save` wrote; raises :class:`WeftError` where it is not there or another thing."""
    hint = "measure it there: weft compare --measure-noise"
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, here is {FORMAT}")
        spreads = tuple(Spread(**s | {"medians": tuple(s["medians"])}) for s in data["spreads"])
        if not spreads or not all(m > 0 for s in spreads for m in s.medians):
            raise ValueError("no medians")
        if not all(s.medians for s in spreads):
            raise ValueError("a point with no run")
        machine, runs = dict(data["machine"]), int(data["runs"])
        arguments = tuple(map(str, data["arguments"]))
        return Noise(machine=machine, runs=runs, arguments=arguments, spreads=spreads)
    except OSError as error:
        raise WeftError("no measured noise", got=f"{path}: {error.strerror}", hint=hint) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeftError(
            f"{path} holds no measured noise", got=f"{type(error).__name__}: {error}", hint=hint
        ) from error


def kept(machine: Mapping[str, Any]) -> Noise | None:
    """What was measured on such a machine and is kept here; None where nothing was."""
    path = path_for(machine)
    return load(path) if path.exists() else None


def save(path: Path, noise: Noise) -> None:
    """Keep the noise at ``path``; raises :class:`WeftError` where it cannot be written."""
    hint = "--noise FILE elsewhere, or set WEFT_CACHE_DIR to a folder that can be written"
    write_json(path, {"format": FORMAT, **asdict(noise)}, what="the noise", hint=hint)


def from_runs(runs: Sequence[Sequence[Record]], arguments: Sequence[str] = ()) -> Noise:
    """The noise that runs of the same thing show, each a process's records.

    Raises :class:`WeftError` where no point was timed twice, or the runs are of unlike machines.
    """
    medians: dict[tuple[str, ...], list[float]] = {}
    machines: dict[Identity, Mapping[str, Any]] = {}
    for r in (r for run in runs for r in run):
        machines[identity(r.machine)] = r.machine
        if r.timing and r.timing.cold > 0:
            key = (r.operator, r.implementation, r.case, r.direction)
            medians.setdefault(key, []).append(r.timing.cold)
    spreads = [
        Spread(
            **dict(zip(("operator", "implementation", "case", "direction"), key, strict=True)),
            medians=tuple(found),
        )
        for key, found in medians.items()
        if len(found) > 1
    ]
    if len(machines) != 1 or not spreads:
        raise WeftError(
            "the noise could not be measured",
            expected="runs on one machine that time something twice",
            got=f"{len(machines)} machines, {len(spreads)} points timed twice",
            hint="call weft bench with the same arguments and see what it says",
        )
    machine = {k: v for k, v in next(iter(machines.values())).items() if k != "ceilings"}
    most = max(len(s.medians) for s in spreads)
    return Noise(machine=machine, runs=most, arguments=tuple(arguments), spreads=tuple(spreads))


def measure(
    arguments: Sequence[str], *, pairs: int = PAIRS, say: Say, seed: int | None = None
) -> Noise:
    """Run `weft bench` with these arguments twice, ``pairs`` times, each in a fresh process.

    The operators, which are the arguments up to the first option, have a process each, and their
    order within a pair is drawn anew, so that nobody always runs after the same neighbour.
    Raises :class:`WeftError` where bench calls the call wrong.
    """
    if pairs < 1:
        raise WeftError("--pairs", expected="1 or more", got=pairs)
    first = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    options = list(arguments[first:])
    jobs = [[word, *options] for word in arguments[:first]] or [options]
    drawn = random.Random(seed)
    runs: list[list[Record]] = []
    with tempfile.TemporaryDirectory(prefix="weft-noise-") as folder:
        for pair in range(pairs):
            order = [*jobs, *jobs]
            drawn.shuffle(order)
            for number, job in enumerate(order, 1):
                say(f"pair {pair + 1} of {pairs}, {number} of {len(order)}: {' '.join(job)}")
                runs.append(_bench(job, Path(folder) / f"{pair}-{number}.jsonl"))
    return from_runs(runs, arguments)


def _bench(arguments: Sequence[str], path: Path) -> list[Record]:
    """One run of `weft bench` in a process of its own. Exit code 1 is a verdict on a candidate,
    and what was timed all the same is taken."""
    command = [sys.executable, "-m", "weft", "bench", *arguments, "--save", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode not in (0, 1) or not path.exists():
        said = [line for line in done.stderr.splitlines() if line.strip()]
        told = [line for line in said if line.startswith("error: ")] or said[-1:] or ["no word"]
        raise WeftError(
            f"weft bench {' '.join(arguments)} did not run",
            got=f"exit code {done.returncode}: {told[0].removeprefix('error: ')}",
            hint="what follows --measure-noise is handed to weft bench; options come after --",
        )
    return record.read(path)[0]
