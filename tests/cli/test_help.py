"""``weft help`` lists every page and shows it: as Markdown in a pipe, formatted on a terminal."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.paths import ROOT
from weft.cli import app
from weft.core import registry
from weft.core.errors import WeftError
from weft.workbench import pages

DOCS = ROOT / "docs"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["help", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_page_is_a_topic_with_a_line_about_it() -> None:
    listed = json.loads(run("--json"))
    assert {p["topic"] for p in listed} == {f.stem for f in DOCS.rglob("*.md")}
    assert len({p["topic"] for p in listed}) == len(listed)
    lines = run().splitlines()
    for page in listed:
        assert any(line.split()[:1] == [page["topic"]] for line in lines)
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("topic", ["correct", "trust/correct", "docs/trust/correct.md"])
def test_a_page_in_a_pipe_is_its_markdown(topic: str) -> None:
    source = (DOCS / "trust" / "correct.md").read_text()
    shown = run(topic)
    assert shown.startswith(source.partition("\n")[0]) and "\x1b" not in shown
    assert "[[[cog" not in shown and set(shown.splitlines()) <= set(source.splitlines())
    assert json.loads(run(topic, "--json"))["text"] == shown


def test_an_operator_is_a_topic() -> None:
    for name in registry.operator_names():
        assert pages.page(name).file.is_file()
    assert run("layer_norm") == run("rms_norm")  # one family, one page


def test_a_command_without_a_page_shows_its_options() -> None:
    assert run("bench").startswith("Usage: weft bench") and "--save FILE" in run("bench")
    assert run("inspect").startswith("# ")  # there is a page of this name


def test_a_page_on_a_terminal_is_formatted_and_paged(monkeypatch: pytest.MonkeyPatch) -> None:
    import pydoc

    paged: list[str] = []
    monkeypatch.setattr(pydoc, "pager", paged.append)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    run("install")
    (text,) = paged
    assert "Install Weft" in text and "\x1b[" in text and "| --- |" not in text


def test_an_installation_finds_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkout the pages are read from share/weft/docs beside the package."""
    package = tmp_path / "site-packages" / "weft"
    monkeypatch.setattr(pages, "PACKAGE", package)
    monkeypatch.setattr(pages.metadata, "files", lambda name: None)
    monkeypatch.setattr(pages.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(WeftError, match="documentation is not installed"):
        pages.folder()
    installed = tmp_path / "share" / "weft" / "docs"
    installed.mkdir(parents=True)
    (installed / "index.md").write_text("# Weft\n")
    assert pages.folder() == installed


def test_the_wheel_is_configured_to_contain_every_page() -> None:
    """The wheel itself is built by a slow test of tests/test_install.py."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    files = {f for patterns in declared.values() for pattern in patterns for f in ROOT.glob(pattern)}
    assert files == set(DOCS.rglob("*.md"))
    for target, patterns in declared.items():
        assert [target.replace("share/weft/", "") + "/*.md"] == patterns


def test_the_metadata_names_no_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "urls" not in project  # none is public yet; see the comment in pyproject.toml
