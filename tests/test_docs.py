"""The documentation is current: generated blocks, links, commands, shell lines, figures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sample_records import CPU, GPU, bench, record
from weft.core import registry
from weft.core.errors import WeftError
from weft.core.record import append, read
from weft.workbench import catalogue, figures

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "src").rglob("README.md")),
]
IDS = [str(p.relative_to(ROOT)) for p in PAGES]
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)


def prose(page: Path) -> str:
    """A page without its code, where brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for target in LINK.findall(prose(page)):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            dead.append(target)
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_shell_blocks_parse(page: Path) -> None:
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language in ("", "sh", "bash", "console") and re.match(r"(weft|make|pip|git) ", block):
            plain = re.sub(r"<[^>\n]+>", "NAME", block)
            done = subprocess.run(["bash", "-n"], input=plain, capture_output=True, text=True)
            assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_the_readme_s_shell_lines_name_commands_that_are_there() -> None:
    from weft.cli import COMMANDS

    makefile = (ROOT / "Makefile").read_text()
    for _, block in FENCE.findall((ROOT / "README.md").read_text()):
        for tool, verb in re.findall(r"^(weft|make) ([\w-]+)", block, re.M):
            assert verb in COMMANDS if tool == "weft" else f"\n{verb}:" in makefile


def test_every_command_is_documented_and_shown_in_the_readme() -> None:
    from weft.cli import COMMANDS

    page = (ROOT / "docs" / "commands.md").read_text()
    readme = (ROOT / "README.md").read_text()
    for command in COMMANDS:
        assert f"`weft {command}`" in page
        assert f"weft {command}" in readme


def test_every_page_of_docs_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    missing = [p.name for p in (ROOT / "docs").glob("*.md") if f"({p.name})" not in index]
    assert missing == ["index.md"]


def test_the_readme_says_what_how_and_how_fast_by_its_25th_line() -> None:
    head = "\n".join((ROOT / "README.md").read_text().splitlines()[:25])
    for text in ("make bench", "make test", "pip install", "figures.readme()"):
        assert text in head


def test_python_blocks_of_the_readme_run() -> None:
    for language, block in FENCE.findall((ROOT / "README.md").read_text()):
        if language == "python":
            exec(compile(block, "README.md", "exec"), {})


def test_generated_blocks_are_current() -> None:
    pages = [str(p) for p in PAGES if "[[[cog" in p.read_text(encoding="utf-8")]
    assert str(ROOT / "README.md") in pages
    command = [sys.executable, "-m", "cogapp", "--check", "--diff", *pages]
    found = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=found, timeout=300)
    assert done.returncode == 0, f"make docs\n{done.stdout}\n{done.stderr}"


def results(folder: Path) -> Path:
    append(folder / figures.slug(GPU["device"]) / "all.jsonl", bench(GPU))
    append(folder / figures.slug(CPU["device"]) / "all.jsonl", bench(CPU))
    return folder


def test_a_folder_is_named_after_its_device() -> None:
    assert figures.slug("Some GPU (40 GB)") == "some-gpu-40-gb"
    assert figures.slug("!") == "unknown"


def test_the_readme_s_figures_name_device_date_commit_and_versions(tmp_path: Path) -> None:
    text = figures.readme(results(tmp_path))
    for told in ("Example GPU 9000", "2026-01-02", "0123456789", "torch 2.11.0", "triton 3.6.0"):
        assert told in text
    assert "Example CPU" not in text  # GPU figures lead where there are any
    assert "Example CPU" in figures.everything(tmp_path)
    assert "with uncommitted changes" in figures.everything(tmp_path)


def test_goals_are_told_as_they_stand(tmp_path: Path) -> None:
    folder = results(tmp_path) / figures.slug(GPU["device"])
    matmul = {"operator": "matmul", "case": "bf16-8192x8192-8192x8192", "of": "torch"}
    goals = [
        {"operator": "gelu", "case": "bf16-16384x16384", "ours": ["cuda"], "at_least": 0.5},
        {"operator": "gelu", "case": "bf16-16384x16384", "ours": ["cuda"], "at_least": 0.999},
        {**matmul, "ours": ["cuda"], "at_least": 0.6},
        {"operator": "gelu", "case": "nowhere", "ours": ["cuda"], "at_least": 0.5},
    ]
    (folder / "goals.json").write_text(json.dumps(goals))
    rows = [line for line in figures.readme(tmp_path).splitlines() if line.startswith("| ")][2:]
    outcomes = [re.sub(r"[\d.]+ %", "N", row.split("|")[-2]).strip() for row in rows]
    assert outcomes == ["met: N", "**missed: N**", "**missed: N**", "not measured"]


def test_an_operator_s_figures_hold_six_ways_and_its_ladder(tmp_path: Path) -> None:
    text = figures.operator("sum", results(tmp_path))
    assert "| case | eager | torch | compile | triton | cuda | numba |" in text
    assert "The cuda ladder at" in text and "`cuda/03-dynamic-shared`" in text
    assert figures.operator("nothing", tmp_path) == "No records of `nothing` are committed yet.\n"


def test_a_suspect_time_is_nobody_s_best(tmp_path: Path) -> None:
    fast = record(cold=1.0, efficiency=50.0, flags=("suspect: faster than the floor",))
    append(tmp_path / "a" / "a.jsonl", [fast, record(implementation="cuda", cold=80.0)])
    row = figures.everything(tmp_path).splitlines()[-3]
    assert "| cuda |" in row
    assert "| suspect |" in figures.operator("gelu", tmp_path)


def test_no_committed_time_is_suspect() -> None:
    timed = 0
    for file in sorted((ROOT / "results").glob("*/*.jsonl")):
        for one in read(file)[0]:
            timed += one.timing is not None
            alarms = [f for f in one.flags if f.startswith("suspect")]
            assert not alarms, (file.name, one.case, one.implementation, alarms)
    assert timed > 400


def test_tables_hold_text_with_bars_and_no_records_are_said(tmp_path: Path) -> None:
    odd = replace(record(), operator="a|b\nc")
    append(tmp_path / "a" / "a.jsonl", [odd])
    assert "a\\|b c" in figures.everything(tmp_path)
    assert figures.readme(tmp_path / "none") == figures.MISSING + "\n"


def test_torn_lines_in_committed_records_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a" / "a.jsonl"
    append(file, [record()])
    with file.open("a") as end:
        end.write("{torn")
    with pytest.raises(WeftError, match="torn"):
        figures.readme(tmp_path)


def test_committed_goals_name_cases_that_are_there() -> None:
    for file in (ROOT / "results").glob("*/goals.json"):
        for goal in json.loads(file.read_text()):
            figures.Goal(**{**goal, "ours": tuple(goal["ours"])})
            registry.operator(goal["operator"]).case(goal["case"])


def test_the_catalogue_has_every_operator_and_implementation() -> None:
    text = catalogue.operators()
    for name in registry.operator_names():
        assert f"\n## {name}\n" in f"\n{text}"
        for implementation in registry.implementation_names(name):
            assert f"[{implementation}](" in text
