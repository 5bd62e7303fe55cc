"""Completion offers the correct names in each shell, and does not import torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from helpers.paths import SRC
from weft.cli import COMMANDS, completion
from weft.core import registry
from weft.lab.demos import DEMOS

# Run by a shell at each press of the completion key. The last line tells what has been imported.
PROGRAM = """
import atexit, sys
sys.argv = ["weft"]
HEAVY = ("torch", "triton", "numpy", "numba")
atexit.register(lambda: print("heavy:", [m for m in HEAVY if m in sys.modules], file=sys.stderr))
from weft.cli import main
main()
"""
ATTENTION = registry.implementation_names("attention")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SRC)}


def complete(line: str) -> list[str]:
    """Return what bash would offer at the end of ``line``; assert that nothing heavy was imported."""
    words = line.split(" ")
    variables = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_WEFT_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=ENVIRONMENT | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["heavy: []"]
    return done.stdout.split()


def test_a_heavy_import_would_be_seen() -> None:
    code = PROGRAM.replace("from weft.cli import main", "import numpy").replace("main()", "")
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert "numpy" in done.stderr


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("weft ", list(COMMANDS)),
        ("weft st", ["study"]),
        ("weft check sof", ["softmax"]),
        ("weft bench gelu sw", ["swiglu"]),
        ("weft ops ", registry.operator_names()),
        ("weft profile rop", ["rope"]),
        ("weft check attention --impl t", [n for n in ATTENTION if n.startswith("t")]),
        ("weft inspect sum --impl cuda/01", ["cuda/01-global-atomics"]),
        ("weft check --impl torch/f", ["torch/flash"]),  # of all operators
        ("weft check --impl=torch/f", ["torch/flash"]),
        ("weft check gelu --case fp32-7", ["fp32-7x129"]),
        ("weft bench --device ", ["cpu", "cuda"]),
        ("weft check gelu --direction b", ["backward"]),
        ("weft new softmax --backend c", ["cuda"]),
        ("weft inspect --backend n", ["numba"]),
        ("weft hardware h200", ["h200", "h200-nvl"]),
        ("weft hardware --operator sof", ["softmax"]),
        ("weft hardware --operator gelu --case fp32-7", ["fp32-7x129"]),
        ("weft claims strassen", ["strassen-unstable", "strassen-pays-at-100"]),
        ("weft demo co", ["coalescing"]),
        ("weft demo ", ["all", *DEMOS]),
        ("weft help corr", ["correct"]),
        ("weft learn s", ["show", "status"]),
        ("weft learn next who", ["who_runs_where"]),
        ("weft help soft", ["softmax"]),
        ("weft study ", ["mlp", "loops", "sparsity"]),
        ("weft learn c", ["check", "cards"]),
        ("weft data s", ["shakespeare", "show"]),
        ("weft train --strategy f", ["fsdp"]),
        ("weft check --all", ["--all-cases"]),
        ("weft check --with mi", []),  # a file: the shell completes it
        ("weft report re", []),
    ],
)  # fmt: skip
def test_the_names_that_bash_offers(line: str, expected: list[str]) -> None:
    assert complete(line) == expected


@pytest.mark.parametrize(
    ("shell", "variables", "expected"),
    [
        ("zsh", {"_TYPER_COMPLETE_ARGS": "weft check sof"}, "softmax"),
        (
            "fish",
            {"_TYPER_COMPLETE_ARGS": "weft check sof", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
            "softmax",
        ),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "weft check --with mi"}, "_files"),
    ],
)
def test_zsh_and_fish_are_answered_too(shell: str, variables: dict[str, str], expected: str) -> None:
    variables = variables | {"_WEFT_COMPLETE": f"complete_{shell}"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=ENVIRONMENT | variables, capture_output=True, text=True
    )
    assert expected in done.stdout and done.stderr.splitlines() == ["heavy: []"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_itself_completes_with_the_script_that_weft_prints(tmp_path) -> None:
    """Source the script, press the key, read the answer: in a real bash."""
    program = tmp_path / "weft"
    program.write_text(f"#!{sys.executable}\nfrom weft.cli import main\nmain()\n")
    program.chmod(0o755)
    script = """
        eval "$(_WEFT_COMPLETE=source_bash weft)"
        COMP_WORDS=(weft check softmax --impl cuda/0) COMP_CWORD=4
        _weft_completion weft
        echo "${COMPREPLY[@]}"
    """
    environment = ENVIRONMENT | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    steps = [n for n in registry.implementation_names("softmax") if n.startswith("cuda/0")]
    assert done.stdout.split() == steps, done.stderr


def test_the_stored_case_names_are_current() -> None:
    stored = completion.CASE_NAMES.read_text(encoding="utf-8")
    assert stored == completion.case_names(), "run python -m weft.cli.completion, or make docs"
