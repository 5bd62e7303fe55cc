"""What every test shares: the markers, hypothesis' profiles, a cache of its own, and an account of
what was not run here and why."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import hypothesis
import pytest

from alone import place
from interpreting import search_once
from weft import machine
from weft.core import Ceilings
from weft.machine.ceilings import Kept, path_for, save

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
BROWSER = ("chromium", "chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-dev-shm-usage"
)
LEFT_OUT = pytest.StashKey[dict[str, int]]()
APT, PIP = ("chromium", "chromium-driver"), "pip install selenium"

# No deadline: a first call compiles. In CI the same examples each time, so that red is repeatable.
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if IN_CI else "here")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="every point of what slow tests sample"
    )
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_FromWorkers())
    if os.environ.get("WEFT_REQUIRE_GPU") and not machine.has_gpu():
        raise pytest.UsageError(f"GPU tests were asked for, but {machine.gpu_reason()}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out_what_needs_a_gpu(config, items)
    for item in items:
        if item.get_closest_marker("exhaustive") and not config.getoption("--exhaustive"):
            reason = "exhaustive: run with --exhaustive; the other tests take a sample of it"
            item.add_marker(pytest.mark.skip(reason=reason))
        elif item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow, or make test"))


def _leave_out_what_needs_a_gpu(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thousands of tests, each of which would take milliseconds to be skipped; the account at the
    end has them all the same."""
    if machine.has_gpu():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    config.stash[LEFT_OUT] = dict(Counter(item.nodeid.split("::")[0] for item in left_out))
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish() -> None:
    """Modules and tests by the ten thousand, which stay to the end, are no garbage collector's to
    look through: it would at every collection, and the workbench asks for one at every point."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a process of xdist, which the account is not in
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, {})


class _FromWorkers:
    """Each worker collects the same tests: what one left out, all did."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        left_out = getattr(node, "workeroutput", {}).get("left_out", {})
        node.config.stash[LEFT_OUT] = left_out or node.config.stash.get(LEFT_OUT, {})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    skipped = any(m.name == "skip" for m in item.iter_markers())
    with nullcontext() if skipped else place(item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.get_closest_marker("browser"):
        return
    missing = [p for p in BROWSER if not shutil.which(p)]
    if importlib.util.find_spec("selenium") is None:
        missing.append("selenium")
    if missing:
        reason = f"needs {' and '.join(missing)}: apt-get install {' '.join(APT)}; {PIP}"
        if IN_CI:
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def memory_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a GPU test held is free for the next, and for the other workers on its device."""
    yield
    if request.node.get_closest_marker("gpu"):
        import torch

        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium without a screen, whose console and requests are kept for the test to read."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # The driver is named, so that selenium looks for none and downloads none.
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    yield driver
    driver.quit()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled kernels and ceilings of this run go to a folder of its own, not to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE_DIR", str(tmp_path_factory.mktemp("weft-cache")))
        _no_limit_on_a_cpu()
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Triton's interpreter, where it is this machine's way, without its search at every call."""
    with pytest.MonkeyPatch.context() as patch:
        if not machine.has_gpu():
            search_once(patch)
        yield


def _no_limit_on_a_cpu() -> None:
    """Ceilings out of reach, so that no command measures them: beside other tests that takes ten
    seconds, is doubtful, and is done again by the next process. GPU tests measure theirs."""
    cpu = machine.query("cpu")
    rates = dict.fromkeys(("fp64", "fp32", "tf32", "bf16", "fp16"), 1e15)
    out_of_reach = Ceilings(
        device=cpu.name, copy=1e13, read=1e13, fill=1e13, matrix=rates, measured="never: a test's"
    )
    save(path_for(cpu), Kept(out_of_reach, "", machine.fingerprint("cpu")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A section that says how many tests were not run here, by reason and by file."""
    reasons: dict[str, Counter[str]] = {}
    if left_out := terminalreporter.config.stash.get(LEFT_OUT, {}):
        reasons[f"needs a GPU: {machine.gpu_reason()}"] = Counter(left_out)
    for report in terminalreporter.stats.get("skipped", []):
        # A skip's longrepr is (file, line, reason).
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        by_file = reasons.setdefault(reason.removeprefix("Skipped: "), Counter())
        by_file[report.nodeid.split("::")[0]] += 1
    if not reasons:
        return
    terminalreporter.section("not run here")
    for reason, by_file in sorted(reasons.items(), key=lambda kv: -sum(kv[1].values())):
        terminalreporter.write_line(f"{sum(by_file.values()):5d}  {reason}")
        for file, count in sorted(by_file.items()):
            terminalreporter.write_line(f"       {count:5d}  {file}")
