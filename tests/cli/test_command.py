"""Help pages have three examples that parse and one style of defaults; wrong calls have one form of error."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import typing
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

import weft
from weft import cli
from weft.cli.command import GROUPS, UsageError
from weft.workbench import pages

GROUP: Any = get_command(cli.app)


def help_page(name: str, width: int = 80) -> str:
    arguments = [name, "--help"] if name else ["--help"]
    result = CliRunner().invoke(cli.app, arguments, prog_name="weft", terminal_width=width)
    assert result.exit_code == 0, result.output
    return result.output


def examples(name: str) -> list[str]:
    epilog = GROUP.commands[name].epilog
    return re.findall(r"^  (weft .*)$", epilog.partition("\n\n")[0], re.M)


def parse(line: str) -> None:
    """Parse a command line as the shell and the command's parser do; raise a usage error if that fails."""
    words = shlex.split(re.sub(r" > \S+$", "", line))
    assert words[0] == "weft"
    with GROUP.commands[words[1]].make_context(words[1], words[2:]):
        pass


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_has_three_examples_that_parse(name: str) -> None:
    lines = examples(name)
    assert len(lines) == 3 and len(set(lines)) == 3
    for line in lines:
        assert line.split()[1] == name and len(line) <= 78
        parse(line)
    page = help_page(name)
    assert "Examples:\n  weft" in page  # as they are written, one in a line
    assert max(map(len, page.splitlines())) <= 80


def test_an_example_with_an_unknown_option_is_caught() -> None:
    for line in ("weft bench --nope", "weft study", "weft check --seed x"):
        with pytest.raises(UsageError):
            parse(line)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_defaults_have_one_style(name: str) -> None:
    page = " ".join(help_page(name).split())
    assert not re.search(r"(?i)\(default|default[^:]?=|defaults to|\[default [^:]", page)
    assert len(re.findall("default: ", page)) == len(re.findall(r"\[default: [^\]]+\]", page))
    assert not re.search(r"\[default: \d+\.0\]", page)
    for param in GROUP.commands[name].params:
        stated = "[default: " in (param.help or "")
        valued = param.default not in (None, False, "") and not callable(param.default)
        assert stated or not valued, f"{name} {param.opts}: its default {param.default} is not shown"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_many_options_are_shown_in_groups(name: str) -> None:
    page = help_page(name)
    headings = re.findall(r"^([A-Z][A-Za-z ]+):$", page, re.M)
    options = [p for p in GROUP.commands[name].params if p.param_type_name == "option"]
    assert set(headings) <= {*GROUPS, "Arguments", "Examples"}
    assert len(headings) >= 4 if len(options) > 8 else "Examples" in headings
    groups = page[page.index(f"\n{headings[0]}:\n") :]  # without the description, which names options too
    for option in options:
        assert len(re.findall(rf"^  (?:-\w, )?{option.opts[-1]}(?![\w-])", groups, re.M)) == 1


@pytest.mark.parametrize("name", ["", *cli.COMMANDS])
def test_help_names_topics_that_exist_and_no_file_of_a_checkout(name: str) -> None:
    page = help_page(name)
    assert "docs/" not in page
    for topic in re.findall(r"weft help ([a-z][\w-]*)", page):
        assert pages.page(topic).file.is_file()


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ("bench --nope", "unknown option of weft bench: got --nope", "weft bench --help"),
        ("bench --cas x", "unknown option of weft bench: got --cas", "--all-cases, --case"),
        ("judge", "weft judge: expected REFERENCE, got none", "weft judge --help"),
        ("check --seed", "weft check: --seed: expected a value, got none", "weft check --help"),
        ("check --seed x", "weft check: --seed: expected a valid integer, got x", "weft check --help"),
        ("help a b", "weft help: expected no further argument, got b", "weft help --help"),
        ("bnch", "unknown command: expected one of device,", "did you mean bench"),
        ("--nope", "unknown option of weft: got --nope", "weft --help"),
        ("help corect", "unknown topic: expected one of ", "did you mean correct"),
    ],
)
def test_a_wrong_call_is_an_error_a_hint_and_exit_2(
    arguments: str,
    error: str,
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["weft", *arguments.split()])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert stopped.value.code == 2 and out == ""
    assert first.startswith(f"error: {error}")
    assert second.startswith("hint: ") and hint in second


@pytest.mark.parametrize("gpu_was_used", [True, False])
def test_destructors_of_a_gpus_libraries_do_not_change_the_exit_code(gpu_was_used: bool) -> None:
    program = f"""
import atexit, os, sys
from types import SimpleNamespace
class Library:
    def __del__(self):
        os._exit(99)
library = Library()
sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: {gpu_was_used}))
atexit.register(print, "atexit ran")
sys.argv = ["weft", "--version"]
from weft.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "atexit ran" in done.stdout, done.stderr
    assert done.returncode == (0 if gpu_was_used else 99)


def test_dir_lists_the_public_names_and_each_is_there() -> None:
    names = dir(weft)
    assert {"patch", "implementation", "operator", "ops", "nn", "WeftError", "case"} <= set(names)
    assert all(getattr(weft, name) is not None for name in names)
    with pytest.raises(AttributeError):
        weft.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("selftest", "--honest", "-1"), "--honest: expected"),
        (("selftest", "--honest", str(2**70)), "--honest: expected"),
        (("selftest", "--jobs", "0"), "--jobs: expected"),
        (("generate", "no-such-folder", "--prompt", "a\udcff"), "other bytes at character 2"),
    ],
)
def test_a_value_out_of_range_is_one_error(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def unnamed_options(function: Any) -> list[str]:
    """Return the options of a command's function that state no name and have it as their metavar."""
    hints = typing.get_type_hints(function, include_extras=True)
    infos = {name: info for name, hint in hints.items() for info in getattr(hint, "__metadata__", ())}
    return [
        name
        for name, info in infos.items()
        if not getattr(info, "param_decls", True) and (info.metavar or "").lower() == name
    ]


def test_options_are_lower_case_in_every_release_of_typer() -> None:
    """Typer 0.27 calls an option ``--NAME`` if its metavar is NAME and its parameter ``name``."""

    def wrong(name: Annotated[str, typer.Option(metavar="NAME")]) -> None: ...

    assert unnamed_options(wrong) == ["name"]
    assert [c.callback.__name__ for c in cli.app.registered_commands if unnamed_options(c.callback)] == []
