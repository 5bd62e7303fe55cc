"""Each command ends with its verdict in one line on stdout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.paths import EXAMPLES, ROOT, SRC
from helpers.sample_records import record
from weft import cli
from weft.core.record import append
from weft.workbench.explain.inspect.subjects import INTERPRETER_SWITCHES

JUDGE = EXAMPLES / "judge" / "kernelbench" / "gelu"
POINT = ("--case", "fp32-7x129", "--direction", "forward", "--device", "cpu")
SECONDS = r"\([\d.]+ (s|min)\)"


def records(folder: Path) -> str:
    file = folder / "records.jsonl"
    append(file, [record(), record(implementation="other")])
    return str(file)


def text(folder: Path) -> str:
    file = folder / "book.txt"
    file.write_text("a short text\n" * 9)
    return str(file)


Arguments = Callable[[Path], tuple[object, ...]]
# Arguments of a short call of each command, and the pattern of its last line.
ENDINGS: dict[str, tuple[Arguments, str]] = {
    "device": (
        lambda _: ("--device", "cpu"),
        rf".+: \d of 6 backends work, peak rates (not )?measured {SECONDS}(; not run: \d \(.+\))?",
    ),
    "ops": (lambda _: (), r"\d+ operators, \d+ implementations, .+"),
    "check": (
        lambda _: ("gelu", "--impl", "torch", "--impl", "cuda", *POINT),
        rf"passed: 1 of 1 check of gelu, 1 implementation {SECONDS}; not run: 1 \(no GPU: cuda\)",
    ),
    "bench": (
        lambda _: ("gelu", "--impl", "eager", "--impl", "cuda", "--quick", *POINT),
        # On a busy machine the only time may be suspect.
        rf"(passed: |failed: 1 suspect; )1 timed at 1 point of gelu {SECONDS}; not run: 1 \(no GPU: cuda\)",
    ),
    "compare": (
        lambda folder: (records(folder), records(folder)),
        rf"passed: 2 points: 2 \w+ {SECONDS}",
    ),
    "report": (
        lambda folder: (records(folder), "-o", folder / "page.html"),
        r"written: \S+page\.html \(2 records of 1 device\)",
    ),
    "profile": (
        lambda folder: ("gelu", "--case", "fp32-7x129", "--device", "cpu", "--quick", "--out", folder),
        rf"(good|wrong: \d flags?): \d+ files written to \S+ {SECONDS}",
    ),
    "inspect": (
        lambda _: ("gelu", "--impl", "cuda", "--case", "fp32-7x129", "--direction", "forward"),
        rf"compiled: 1 kernel of 1 implementation of gelu for sm_90 {SECONDS}",
    ),
    "judge": (
        lambda _: (JUDGE / "reference.py", JUDGE / "right.py", "--no-time", "--device", "cpu"),
        rf"correct: \d+ checks passed; not timed {SECONDS}",
    ),
    "selftest": (
        lambda _: ("--mutant", "W02/sum/eager/first-answer", "--device", "cpu"),
        rf"passed: killed 1 of 1 that ran {SECONDS}",
    ),
    "hardware": (lambda _: (), r"shown: 24 GPUs"),
    "claim": (
        lambda _: ("gelu fp32 2^28 in 1 ms on h200 sxm",),
        r"possible: it would be 45 % of the limit by bytes; the shortest is 447.4 us on h200",
    ),
    "claims": (lambda _: ("sparsity-halves-weights",), rf"tested: 1 claim: 1 false {SECONDS}"),
    "debug": (
        lambda _: ("gelu", "--impl", "triton", "--program", "0"),
        rf"passed: 1 program of 1 launch: none out of bounds, no race {SECONDS}",
    ),
    "demo": (lambda _: ("coalescing",), rf"shown: 1 demo, [01] timed {SECONDS}"),
    "ladder": (
        lambda _: ("softmax", ROOT / "results" / "nvidia-h200"),
        r"shown: 1 ladder of softmax, 6 steps",
    ),
    "study": (
        lambda folder: (
            *("mlp", "--redraw", ROOT / "results" / "nvidia-h200" / "study-mlp.json"),
            *("--no-pictures", "--out", folder),
        ),
        rf"good: \d+ points of the MLP on cuda {SECONDS}",
    ),
    "prune": (
        lambda _: ("--quick", "--steps", 10),
        rf"(passed|failed): winning tickets (do not )?beat both controls at 10 % density, .+ {SECONDS}",
    ),
    "tune": (lambda _: ("--show", "--device", "another"), rf"0 points {SECONDS}"),
    "learn": (
        lambda folder: ("--folder", folder),
        r"0 of \d+ exercises done; now: 1 .+: weft learn next",
    ),
    "data": (
        lambda folder: ("encode", text(folder), "--output", folder),
        rf"encoded: 1 file, 117 tokens {SECONDS}",
    ),
    "train": (
        lambda folder: (
            *("--data", text(folder), "--out", folder / "run", "--device", "cpu", "--steps", 2, "--batch", 2),
            *("--layers", 1, "--heads", 1, "--width", 16, "--length", 16, "--set", "sample_tokens=4"),
        ),
        rf"trained: 2 of 2 steps, loss [\d.]+(, validation [\d.]+)? {SECONDS}",
    ),
}
# Their stdout is the text, the path or the page itself.
DATA_ON_STDOUT = {"generate", "new", "help"}
SLOW = {"bench", "profile", "judge", "selftest", "train", "inspect", "demo"}


def test_every_command_has_a_pattern() -> None:
    assert {*ENDINGS} | DATA_ON_STDOUT == {*cli.COMMANDS} | DATA_ON_STDOUT


@pytest.mark.sampled(2, each=lambda command: "" if command in SLOW else command)
@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in ENDINGS]
)
def test_a_command_ends_with_its_verdict(
    command: str, tmp_path: Path, cache_with_ceilings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(cache_with_ceilings))
    arguments, pattern = ENDINGS[command]
    words = [command, *map(str, arguments(tmp_path))]
    if command == "inspect":  # not where Triton was imported to interpret kernels
        process = [sys.executable, "-m", "weft", *words]
        switches = INTERPRETER_SWITCHES.values()  # other tests of this process may have set them
        environment = {k: v for k, v in os.environ.items() if k not in switches} | {"PYTHONPATH": str(SRC)}
        alone = subprocess.run(process, capture_output=True, text=True, env=environment)
        assert alone.returncode == 0 and re.fullmatch(pattern, alone.stdout.rstrip().splitlines()[-1]), alone
        return
    done = CliRunner().invoke(cli.app, words)
    last = done.stdout.rstrip().splitlines()[-1]
    assert re.fullmatch(pattern, last), done.output
    assert done.exit_code == last.startswith(("failed", "wrong")), done.output


def test_json_has_no_verdict_beside_it(tmp_path: Path) -> None:
    file = records(tmp_path)
    check = ("check", "gelu", "--impl", "torch", *POINT)
    for arguments in (("ops",), check, ("compare", file, file)):
        done = CliRunner().invoke(cli.app, [*arguments, "--json"])
        assert done.exit_code == 0, done.output
        json.loads(done.stdout)
