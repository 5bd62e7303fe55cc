"""The documentation is current: generated blocks, links, commands, shell lines, figures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from helpers import sampling
from helpers.sample_records import CPU, GPU, bench, record
from weft.core import registry
from weft.core.errors import WeftError
from weft.core.record import append, read
from weft.core.text import slug
from weft.workbench.report import catalogue, overview
from weft.workbench.report import markdown as figures

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "src").rglob("README.md")),
]
IDS = [str(p.relative_to(ROOT)) for p in PAGES]
# The log and the changelog name modules and pages that existed when they were written.
CURRENT = [p for p in PAGES if p.name not in ("log.md", "CHANGELOG.md")]
CURRENT_IDS = [str(p.relative_to(ROOT)) for p in CURRENT]
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)


def prose(page: Path) -> str:
    """Return a page's text without its code, in which brackets are not links."""
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

    page = (DOCS / "reference" / "commands.md").read_text()
    readme = (ROOT / "README.md").read_text()
    for command in COMMANDS:
        assert f"`weft {command}`" in page
        assert f"weft {command}" in readme


def test_every_page_of_docs_is_in_the_index_and_in_the_site() -> None:
    index, site = (DOCS / "index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).as_posix()
        assert name == "index.md" or f"({name})" in index
        assert f" {name}\n" in site


def test_every_page_of_a_shelf_says_for_whom_it_is() -> None:
    for page in DOCS.glob("*/*.md"):
        first = page.read_text(encoding="utf-8").partition("\n\n")[2].partition("\n\n")[0]
        assert first.startswith("For "), page


def test_the_readme_is_short_and_shows_picture_table_and_install() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    head = "\n".join(lines[:20])
    for text in ("make bench", "make test", "overview-dark.svg", "overview-light.svg", "overview.readme()"):
        assert text in head
    assert "pip install" in "\n".join(lines)


MODULE = re.compile(r"\bweft(?:\.[a-zA-Z_]\w*)+")
PATH = re.compile(r"`((?:src/weft|tests|examples|tools|results)/[\w./-]+)`")


def importable(name: str) -> bool:
    """True if the dotted name is a module of the package, or an attribute of one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            target: object = import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for attribute in parts[count:]:
            if not hasattr(target, attribute):
                return False
            target = getattr(target, attribute)
        return True
    return False


@pytest.mark.parametrize("page", CURRENT, ids=CURRENT_IDS)
def test_every_module_and_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [n for n in sorted(set(MODULE.findall(text))) if not n.endswith(".git") and not importable(n)]
    example = ("silu", "with_cuda_tma", "<", "*")  # names that a recipe invents
    for name in PATH.findall(text):
        if not (ROOT / name).exists() and not any(word in name for word in example):
            missing.append(name)
    assert missing == []


def test_the_drawings_name_files_that_exist() -> None:
    text = (DOCS / "pictures" / "call-path.svg").read_text()
    named = re.findall(r"\b((?:ops|dispatch|backends)/[\w/]+\.(?:py|cu))\b(?:: ([\w, ]+))?", text)
    assert len(named) >= 6, named
    for file, names in named:
        source = (ROOT / "src" / "weft" / file).read_text()
        for name in filter(None, names.split(", ")):
            assert re.search(rf"^(?:def|class) {name}\b", source, re.M), (file, name)


def test_the_readme_s_pictures_are_drawn_from_the_records() -> None:
    for theme in overview.THEMES:
        svg = (ROOT / overview.PICTURES / f"overview-{theme}.svg").read_text()
        assert svg == overview.picture(theme, ROOT / "results"), "python -m weft.workbench.report.overview"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra: pip install 'weft[site]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "index.html").read_text()
    assert not re.search(
        r'(?:src|rel="stylesheet" href)="https?:', page
    )  # the page loads nothing from the web


def test_python_blocks_of_the_readme_run() -> None:
    for language, block in FENCE.findall((ROOT / "README.md").read_text()):
        if language == "python":
            exec(compile(block, "README.md", "exec"), {})


def test_generated_blocks_are_current() -> None:
    """Run a random one of the pages that show many commands; --exhaustive runs all."""
    pages = [str(p) for p in PAGES if "[[[cog" in p.read_text(encoding="utf-8")]
    assert str(ROOT / "README.md") in pages
    commands = [p for p in pages if "overview.transcript(" in Path(p).read_text(encoding="utf-8")]
    assert len(commands) == 3  # each page takes half a minute, since its commands run
    shown = sampling.sample(commands, 1, "pages that show commands")
    pages = [p for p in pages if p in shown or p not in commands]
    command = [sys.executable, "-m", "cogapp", "--check", "--diff", *pages]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600)
    assert done.returncode == 0, f"make docs\n{done.stdout}\n{done.stderr}"


def results(folder: Path) -> Path:
    append(folder / slug(GPU["device"]) / "all.jsonl", bench(GPU))
    append(folder / slug(CPU["device"]) / "all.jsonl", bench(CPU))
    return folder


def test_a_folder_is_named_after_its_device() -> None:
    assert slug("Some GPU (40 GB)") == "some-gpu-40-gb"
    assert slug("!") == "unknown"


def test_figures_name_device_date_commit_and_versions(tmp_path: Path) -> None:
    folder = results(tmp_path)
    text = figures.everything(folder)
    for fact in ("Example GPU 9000", "2026-01-02", "0123456789", "torch 2.11.0", "triton 3.6.0"):
        assert fact in text
    assert "Example CPU" in text
    assert "with uncommitted changes" in text
    assert "Example CPU" not in overview.readme(folder)  # the README shows figures of a GPU


def test_several_commits_are_a_range_of_dates_and_a_number() -> None:
    machines = [
        {"date": "2026-01-03T00:00:00Z", "commit": "a" * 40},
        {"date": "2026-01-01", "commit": "b" * 40},
    ]
    assert figures.dates_and_commits(machines) == "2026-01-01 to 2026-01-03, 2 commits"
    assert figures.dates_and_commits(machines[:1]) == "2026-01-03, commit aaaaaaaaaa"


def test_the_readme_shows_rows_where_another_implementation_is_faster(tmp_path: Path) -> None:
    timed = [("torch", 100.0), ("torch/other", 60.0), ("compile", 110.0), ("cuda", 80.0)]
    rows = [record(implementation=name, cold=cold) for name, cold in timed]
    append(tmp_path / "a" / "a.jsonl", rows)
    (row,) = [line for line in overview.readme(tmp_path).splitlines() if line.startswith("| gelu")]
    assert "80.0 µs | 100 µs | **60.0 µs** torch/other" in row


def test_goals_are_shown_with_their_baseline_and_outcome(tmp_path: Path) -> None:
    folder = results(tmp_path) / slug(GPU["device"])
    matmul = {"operator": "matmul", "case": "bf16-8192x8192-8192x8192", "of": "torch"}
    goals = [
        {"operator": "gelu", "case": "bf16-16384x16384", "ours": ["cuda"], "at_least": 0.5},
        {"operator": "gelu", "case": "bf16-16384x16384", "ours": ["cuda"], "at_least": 0.999},
        {**matmul, "ours": ["cuda"], "at_least": 0.6},
        {"operator": "gelu", "case": "nowhere", "ours": ["cuda"], "at_least": 0.5},
    ]
    (folder / "goals.json").write_text(json.dumps(goals))
    text = figures.everything(tmp_path).rpartition(": goals")[2]
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    outcomes = [re.sub(r"[\d.]+ %", "N", row.split("|")[-2]).strip() for row in rows]
    assert outcomes == ["N", "**missed: N**", "**missed: N**", "not measured"]
    assert [row.split("|")[6].strip() for row in rows] == ["torch", "torch", "torch", "–"]


def test_an_operator_s_figures_hold_six_implementations_and_its_ladder(tmp_path: Path) -> None:
    text = figures.operator("sum", results(tmp_path))
    assert "| case | eager | torch | compile | triton | cuda | numba |" in text
    assert "The cuda ladder at" in text and "`cuda/03-dynamic-shared`" in text
    assert figures.operator("nothing", tmp_path) == "No records of `nothing` are committed yet.\n"


def test_a_suspect_time_is_never_the_best(tmp_path: Path) -> None:
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


def test_tables_escape_bars_and_report_missing_records(tmp_path: Path) -> None:
    odd = replace(record(), operator="a|b\nc")
    append(tmp_path / "a" / "a.jsonl", [odd])
    assert "a\\|b\\nc" in figures.everything(tmp_path)
    assert overview.readme(tmp_path / "none") == figures.MISSING + "\n"


def test_torn_lines_in_committed_records_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a" / "a.jsonl"
    append(file, [record()])
    with file.open("a") as end:
        end.write("{torn")
    with pytest.raises(WeftError, match="torn"):
        figures.everything(tmp_path)


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
