"""Foreign text cannot steer a terminal, and options out of their range are refused."""

from __future__ import annotations

import doctest

import pytest
import typer
from typer.testing import CliRunner

from weft.cli.options import limits
from weft.core import Implementation, WeftError, case, text
from weft.core.cases import Input
from weft.workbench.calls.errors import SandboxDied, WorkerError

FORGED = "boom\x1b[2K\r\nall passed\u202e\x07"
ESCAPED = r"boom\x1b[2K\r\nall passed\u202e\x07"


def test_the_examples_of_the_docstrings() -> None:
    assert doctest.testmod(text).failed == 0


def test_foreign_text_is_shown_escaped() -> None:
    assert text.printable(FORGED) == ESCAPED
    assert text.printable("größer, 2 µs → ok") == "größer, 2 µs → ok"
    assert str(WorkerError(FORGED)) == SandboxDied(FORGED).reason == ESCAPED
    # A compiler's log keeps its lines.
    error = WeftError("kernel.cu", got="line 1\n\x1b[31mline 2")
    assert error.got == "line 1\n\\x1b[31mline 2" and "\x1b" not in str(error)


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[2K", None])
def test_names_are_visible(name: str) -> None:
    x = Input(name="x", shape=(2,), dtype="float32")
    with pytest.raises(WeftError, match="visible characters"):
        Implementation(operator="gelu", name=name, backend="eager", forward=lambda x: x)
    if name:  # a case without a name is named after its contents
        with pytest.raises(WeftError, match="visible characters"):
            case(x, name=name)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, 1e300])
def test_limits_are_finite_and_positive(value: float) -> None:
    for arguments in ((value, 1.0), (1.0, value)):
        with pytest.raises(WeftError, match="a number above 0"):
            limits(*arguments)


@pytest.mark.parametrize("command", ["check", "judge", "generate"])
@pytest.mark.parametrize("seed", ["-1", str(2**70)])
def test_a_seed_out_of_range_is_a_wrong_call(command: str, seed: str) -> None:
    from importlib import import_module

    app = typer.Typer()
    app.command()(getattr(import_module(f"weft.cli.{command}"), command))
    arguments = {"check": ["gelu"], "judge": ["a.py", "b.py"], "generate": ["folder"]}[command]
    result = CliRunner().invoke(app, [*arguments, "--seed", seed])
    assert result.exit_code == 2 and "--seed" in result.output and "than or equal to" in result.output
