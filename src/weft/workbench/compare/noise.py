"""A/A noise: the distance between runs of the same code on one machine, measured and saved.

Each run is a fresh process, because pages, addresses and tuning differ between processes and not within
one. With m the medians of the runs at one point, the spread of the point is max m / min m - 1.
"""

from __future__ import annotations

import math
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.core import Interrupted, Record, WeftError, record
from weft.core.json_files import read_json
from weft.core.log import Log
from weft.core.text import slug
from weft.machine.ceilings import cache_folder
from weft.machine.keep import write_json

# Default noise by kind of device, for machines without a measurement. Between two processes a median moves
# by more than its interval shows, for instance because of other pages or another temperature.
DEFAULT_NOISE = {"cuda": 0.01, "cpu": 0.05}
# Timing stops once a median is known within 0.5 %. Runs that agree better than this agree by chance.
MIN_NOISE = 0.005
PAIRS = 3
FORMAT = 1

MachineKey = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Medians (us) of several runs of the same code at one point."""

    operator: str
    implementation: str
    case: str
    direction: str
    medians: tuple[float, ...]

    @property
    def share(self) -> float:
        """Distance between the medians as a share of the smallest."""
        return max(self.medians) / min(self.medians) - 1

    @property
    def point(self) -> tuple[str, ...]:
        """Operator, implementation, case and direction."""
        return self.operator, self.implementation, self.case, self.direction


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Measured noise of one machine.

    ``machine`` is its fingerprint with date and commit, ``runs`` the number of runs, and ``arguments``
    the arguments of ``weft bench``.
    """

    machine: Mapping[str, Any]
    runs: int
    arguments: tuple[str, ...]
    spreads: tuple[Spread, ...]

    @property
    def usual(self) -> float:
        """Median spread of all points."""
        return max(MIN_NOISE, statistics.median(s.share for s in self.spreads))

    @property
    def wide(self) -> float:
        """Spread that 90 % of the points stay within; it applies to points that were not measured."""
        shares = sorted(s.share for s in self.spreads)
        return max(MIN_NOISE, shares[min(len(shares) - 1, int(0.9 * len(shares)))])

    def of(self, point: Sequence[str], pooled: int = 1) -> float:
        """Return the noise at (operator, implementation, case, direction).

        It is the spread of the point, but at least the usual one: a few runs can agree by chance. The
        noise of a mean of ``pooled`` runs is smaller by the square root of their number.
        """
        own = [s.share for s in self.spreads if s.point == tuple(point)]
        share = max(self.usual, *own) if own else self.wide
        return max(MIN_NOISE, share / math.sqrt(pooled))


def machine_key(machine: Mapping[str, Any]) -> MachineKey:
    """Return what two machines must share to have the same noise.

    These are kind, device, architecture, number of units and power limit.
    """
    # No host name: records carry none, so machines of one make share their noise.
    fields = ("kind", "device", "arch", "units", "power_limit_w")
    return tuple(str(machine.get(field) or "") for field in fields)


def path_for(machine: Mapping[str, Any]) -> Path:
    """Return the noise file of a machine in Weft's cache folder."""
    return cache_folder() / "noise" / f"{slug(' '.join(machine_key(machine)))}.json"


def load(path: Path) -> Noise:
    """Read a file of :func:`save`; raises :class:`WeftError` if it is missing or is not a noise file."""
    hint = "measure it there: weft compare --measure-noise"
    try:
        data = read_json(path)
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


def load_cached(machine: Mapping[str, Any]) -> Noise | None:
    """Return the noise saved in the cache folder for such a machine; None if there is none."""
    path = path_for(machine)
    return load(path) if path.exists() else None


def save(path: Path, noise: Noise) -> None:
    """Write the noise to ``path``; raises :class:`WeftError` if it cannot be written."""
    hint = "--noise FILE elsewhere, or set WEFT_CACHE_DIR to a folder that can be written"
    write_json(path, {"format": FORMAT, **asdict(noise)}, what="the noise", hint=hint)


def from_runs(runs: Sequence[Sequence[Record]], arguments: Sequence[str] = ()) -> Noise:
    """Return the noise that several runs of the same code show; each run is one process's records.

    Raises :class:`WeftError` if no point is timed twice, or if the runs come from unlike machines.
    """
    medians: dict[tuple[str, str, str, str], list[float]] = {}
    machines: dict[MachineKey, Mapping[str, Any]] = {}
    for r in (r for run in runs for r in run):
        machines[machine_key(r.machine)] = r.machine
        # A view takes 0 us, of which there is no ratio.
        if r.timing and r.timing.cold > 0:
            point = (r.operator, r.implementation, r.case, r.direction)
            medians.setdefault(point, []).append(r.timing.cold)
    spreads = [
        Spread(operator=o, implementation=i, case=c, direction=d, medians=tuple(colds))
        for (o, i, c, d), colds in medians.items()
        if len(colds) > 1
    ]
    if len(machines) != 1 or not spreads:
        raise WeftError(
            "the noise could not be measured",
            expected="runs on one machine that time something twice",
            got=f"{len(machines)} machines, {len(spreads)} points timed twice",
            hint="run weft bench with the same arguments and read its output",
        )
    # The peaks change with each measurement and do not identify the machine.
    machine = {k: v for k, v in next(iter(machines.values())).items() if k != "ceilings"}
    num_runs = max(len(s.medians) for s in spreads)
    return Noise(machine=machine, runs=num_runs, arguments=tuple(arguments), spreads=tuple(spreads))


def measure(arguments: Sequence[str], *, pairs: int = PAIRS, log: Log, seed: int | None = None) -> Noise:
    """Run ``weft bench`` with these arguments ``pairs`` times twice, each run in a fresh process.

    The arguments up to the first option are operators. Each of them has a process of its own. Their order
    is shuffled within each pair, so that no operator always runs after the same one.

    Raises :class:`WeftError` if ``weft bench`` rejects the arguments, and :class:`Interrupted` for a
    ``KeyboardInterrupt``, with the noise of the runs so far if there is any.
    """
    if pairs < 1:
        raise WeftError("--pairs", expected="1 or more", got=pairs)
    num_operators = next((i for i, a in enumerate(arguments) if a.startswith("-")), len(arguments))
    options = list(arguments[num_operators:])
    jobs = [[operator, *options] for operator in arguments[:num_operators]] or [options]
    shuffler = random.Random(seed)
    runs: list[list[Record]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="weft-noise-") as folder:
            for pair in range(pairs):
                # Both runs of a pair are shuffled together: a slow drift affects all jobs alike.
                order = [*jobs, *jobs]
                shuffler.shuffle(order)
                for job in order:
                    count = f"[{len(runs) + 1}/{pairs * len(order)}]"
                    log(f"{count} pair {pair + 1} of {pairs}: weft bench {' '.join(job)}")
                    runs.append(_bench(job, Path(folder) / f"{len(runs)}.jsonl"))
    except KeyboardInterrupt as error:
        with suppress(WeftError):  # no point is timed twice yet
            raise Interrupted(from_runs(runs, arguments)) from error
        raise
    return from_runs(runs, arguments)


def _bench(arguments: Sequence[str], path: Path) -> list[Record]:
    """Run ``weft bench`` in a process of its own and return its records.

    Exit code 1 means that an implementation failed; its other records still count.
    """
    command = [sys.executable, "-m", "weft", "bench", *arguments, "--save", str(path)]
    code, errors_text = _run(command)
    if code not in (0, 1) or not path.exists():
        # Progress is on stderr as well: report the error line, or the last line if there is none.
        lines = [line for line in errors_text.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")] or lines[-1:] or ["no output"]
        raise WeftError(
            f"weft bench {' '.join(arguments)} did not run",
            got=f"exit code {code}: {errors[0].removeprefix('error: ')}",
            hint="what follows --measure-noise goes to weft bench; options come after --",
        )
    return record.read(path)[0]


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Run a command that ends with this process; return its exit code and its standard error."""
    # Signals interrupt the main thread alone. Were the process started there, one that comes while it
    # starts would leave a process that nobody knows. `submit` itself can be interrupted, too, after its
    # thread has begun: so the thread puts the process where the handler finds it.
    started: list[subprocess.Popen[str]] = []

    def start() -> None:
        process = subprocess.Popen(
            command,
            text=True,
            stdin=subprocess.DEVNULL,  # a question of the candidate's code must not wait for an answer
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)

    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(start).result()
            errors = started[0].communicate()[1]
        except BaseException:
            pool.shutdown()  # waits for the start, if it has begun
            for process in started:
                process.kill()
                process.communicate()
            raise
    return started[0].returncode, errors
