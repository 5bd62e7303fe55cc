"""Calls of the command line with strange arguments: one error or a result, never a traceback or a hang."""

from __future__ import annotations

import io
import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from helpers.fuzzing import NUMBERS, TEXTS, Hung, control_characters, deadline, generator, strange_files
from weft import cli
from weft.core import registry

# Functions in which a command does its work: an example whose arguments were accepted ends there.
WORK = (
    "weft.workbench.bench.run_points",
    "weft.workbench.compare.noise.measure",
    "weft.workbench.selftest.run.run",
    "weft.workbench.selftest.honest.run",
    "weft.workbench.explain.profile.session.run",
    "weft.workbench.explain.ncu.profile",
    "weft.cli.study_mlp.measure",
    "weft.cli.study_loops.measure",
    "weft.cli.study_sparsity.measure",
    "weft.cli.demo._run",
    "weft.cli.prune._run",
    "weft.cli.tune._measure",
    "weft.cli.tune_audit._measure",
    "weft.cli.inspect._kernels",
    "weft.cli.inspect._compare",
    "weft.cli.inspect._show_generated",
    "weft.machine.ceilings.measure_now",
    "weft.lab.hierarchy.measure",
    "weft.gpt2.launch.Trainer",
    "weft.gpt2.data.fetch.fetch",
)
CODES = {0, 1, 2}
# Metavars of parameters that are numbers, and words of those that are paths.
NUMERIC = ("N", "X", "S", "T", "K", "GIB", "FRACTION")
PATHS = ("FILE", "FOLDER", "DIR", "PATH", "RECORDS", "REFERENCE", "CANDIDATE", "CHECKPOINT")


class Accepted(BaseException):
    """Raised where a command would begin its work."""


def _accept(*_: Any, **__: Any) -> Any:
    raise Accepted


def _value(param: Any, files: list[Path], rng: random.Random) -> str:
    """Return a value for one parameter of a command, sometimes valid and mostly unusual."""
    metavar = str(param.metavar)
    if "|" in metavar and rng.random() < 0.5:
        return rng.choice(metavar.split("|"))
    if metavar in NUMERIC or rng.random() < 0.1:
        return rng.choice(NUMBERS)
    if any(word in metavar for word in PATHS):
        return str(rng.choice(files))
    if rng.random() < 0.5:
        return rng.choice((*registry.FIRST_LOOK, "eager", "torch", "mlp", "show", "encode", "tiny"))
    return rng.choice((*TEXTS, str(rng.choice(files))))


def arguments(name: str, files: list[Path], rng: random.Random) -> list[str]:
    """Return the words of one call of the command ``name``."""
    words, params = [name], cli.typer.main.get_command(cli.app).commands[name].params
    for param in params:
        if param.param_type_name == "argument" and rng.random() < 0.9:
            words += [_value(param, files, rng) for _ in range(1 if param.nargs == 1 else rng.choice((1, 2)))]
    options = [p for p in params if p.param_type_name == "option" and p.name != "help"]
    for param in rng.sample(options, min(len(options), rng.choice((0, 1, 1, 2, 3)))):
        words.append(param.opts[0])
        if not param.is_flag:
            words += [_value(param, files, rng) for _ in range(max(param.nargs, 1))]
    if name == "check":  # its work begins in many places
        words.append("no-such-operator")
    if rng.random() < 0.1:
        words.insert(rng.randrange(1, len(words) + 1), rng.choice((*TEXTS, "--no-such-option")))
    return words


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[object, str]:
    """Run ``weft`` in this process; return its exit code (None: its work would begin) and its output."""
    # As in a real process with a UTF-8 locale: text that stdout cannot encode raises an error.
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    errors = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    monkeypatch.setattr(sys, "argv", ["weft", *words])
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code: object = None
    try:
        with deadline():
            cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    except Accepted:
        code = None
    text = "".join(s.buffer.getvalue().decode() for s in (out, errors))
    return code, text


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for target in WORK:
        module, _, name = target.rpartition(".")
        monkeypatch.setattr(import_module(module), name, _accept)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def _fuzz(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted, codes = 0, set()
    for number in range(count):
        rng = generator("command", number)
        files = strange_files(tmp_path)
        words = arguments(cli.COMMANDS[number % len(cli.COMMANDS)], files, rng)
        with monkeypatch.context() as patch:
            try:
                code, text = run(words, patch)
            except (Exception, Hung) as error:
                patch.undo()
                raise AssertionError(f"example {number}: weft {words}") from error
        assert code is None or code in CODES, (number, words, text)
        assert not (strange := control_characters(text)), (number, words, strange, text)
        if code == 2:
            assert text.count("error:") == 1 or "usage" in text.lower(), (number, words, text)
        accepted += code is None
        codes.add(code)
    # The examples are neither all refused at the first word nor all accepted.
    assert accepted and 2 in codes, (accepted, codes)


def test_strange_arguments_are_one_error(
    no_work: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fuzz(54, tmp_path, monkeypatch)


@pytest.mark.exhaustive
def test_many_strange_arguments_are_one_error(
    no_work: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fuzz(300, tmp_path, monkeypatch)
