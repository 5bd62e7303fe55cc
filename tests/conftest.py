"""Fixtures, options and markers of all tests, and the summary of the tests that were not run here."""

from __future__ import annotations

import gc
import importlib.util
import os
import secrets
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from helpers import margins, resume, sampling
from helpers.alone import execution_lock
from helpers.interpreting import search_once
from weft import machine
from weft.core import Ceilings
from weft.machine.ceilings import StoredCeilings, path_for, save
from weft.machine.fingerprint import commit
from weft.workbench.calls.buffers import release_unused_memory

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
BROWSER = ("chromium", "chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-dev-shm-usage"
)
SLOW_SECONDS = 10.0  # from which --live prints a test's duration
NEIGHBOURS = 16  # consecutive tests that go to the same shard
# Cached GPU memory that a process may keep after a test: to free and to take it stops the whole device.
CACHED_BYTES = 64 << 20
FROZEN_AFTER = 250  # tests on a GPU, after which what is alive is exempt from garbage collection
LEFT_OUT = pytest.StashKey[dict[str, int]]()
TESTS_RUN = pytest.StashKey[int]()
KEPT_BYTES = pytest.StashKey[int]()  # of GPU memory that was in use when no garbage was left
APT, PIP = ("chromium", "chromium-driver"), "pip install selenium"

# No deadline: a first call compiles. In CI the same examples each time, so that a failure is repeatable.
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if IN_CI else "here")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="every point of what slow tests sample")
    parser.addoption("--live", action="store_true", help="name failures and slow tests as they end")
    parser.addoption("--slow", action="store_true", help="run the slow tests too")
    parser.addoption("--resume", metavar="FILE", help="continue a stopped run: FILE has its outcomes")
    parser.addoption("--shard", metavar="I/N", help="run part I of N parts of the tests, I from 0")


def pytest_report_header() -> str:
    return f"WEFT_SAMPLE_SEED={os.environ['WEFT_SAMPLE_SEED']} (sampled tests; set it to repeat a run)"


def pytest_configure(config: pytest.Config) -> None:
    # Here, so that xdist's workers inherit it: all must collect the same tests. So must all shards, or some
    # tests would be in two of them and others in none: their seed is the commit's.
    of_commit = zlib.crc32((commit()[0] or "").encode()) >> 1
    seed = of_commit if config.getoption("--shard") else secrets.randbelow(1 << 31)
    os.environ.setdefault("WEFT_SAMPLE_SEED", str(seed))
    if config.getoption("--exhaustive") or machine.has_gpu():
        os.environ["WEFT_SAMPLE_ALL"] = "1"
    config.pluginmanager.register(_FromWorkers())
    if (file := config.getoption("--resume")) and not hasattr(config, "workerinput"):
        resume.begin(Path(file))
        config.pluginmanager.register(resume.Recorder(Path(file)))
    if config.getoption("--live") and not hasattr(config, "workerinput"):  # no worker has a terminal
        config.pluginmanager.register(_Live(config))
    if os.environ.get("WEFT_REQUIRE_GPU") and not machine.has_gpu():
        raise pytest.UsageError(f"GPU tests were asked for, but {machine.gpu_reason()}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _deselect_gpu_tests(config, items)
    _skip_tests_of_two_gpus(items)
    if shard := config.getoption("--shard"):
        items[:] = _part(items, *_shard(shard))
    if finished := resume.finished():
        items[:] = [item for item in items if item.nodeid not in finished]
    for item in sampling.left_out(items):
        item.add_marker(pytest.mark.skip(reason=sampling.REASON))
    # Tests that measure time come last, so that no worker waits for one while it has other tests to run.
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
    for item in items:
        if item.get_closest_marker("exhaustive") and not config.getoption("--exhaustive"):
            reason = "exhaustive: run with --exhaustive; the other tests take a sample of it"
            item.add_marker(pytest.mark.skip(reason=reason))
        elif item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow, or make test"))


def _shard(text: str) -> tuple[int, int]:
    """Return I and N of ``I/N``; raise UsageError unless 0 <= I < N, since other parts have no tests."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise pytest.UsageError(f"--shard takes I/N with I from 0 to N - 1, as in 0/2; got {text!r}")
    return int(part), int(parts)


def _part(items: list[pytest.Item], part: int, parts: int) -> list[pytest.Item]:
    """Return a shard of the tests. Neighbouring ones share a float64 reference, so that they stay together.

    Those that measure time are few, take long and come in a row: they go to the shards one by one.
    """
    alone = {item.nodeid for item in items if item.get_closest_marker("alone")}
    rest = [item.nodeid for item in items if item.nodeid not in alone]
    chosen = {name for i, name in enumerate(rest) if i // NEIGHBOURS % parts == part}
    chosen |= {name for i, name in enumerate(sorted(alone)) if i % parts == part}
    return [item for item in items if item.nodeid in chosen]


def _deselect_gpu_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect GPU tests on a machine without a GPU; the summary at the end counts them.

    There are thousands of them, and skipping one takes milliseconds.
    """
    if machine.has_gpu():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    config.stash[LEFT_OUT] = dict(Counter(item.nodeid.split("::")[0] for item in left_out))
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def _skip_tests_of_two_gpus(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("two_gpus")]
    if not marked:
        return
    import torch

    if torch.cuda.device_count() < 2:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs, and this process sees fewer"))


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collection.

    They are ten thousand objects that live to the end, and the workbench collects garbage at every point.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exempt the objects that a module's tests leave from garbage collection, a quarter of the run's time.

    Most of them belong to imported modules. On a GPU machine an object may hold GPU memory: nothing is exempt
    while much of it is in use.
    """
    tests_run = item.config.stash[TESTS_RUN] = item.config.stash.get(TESTS_RUN, 0) + 1
    is_due = nextitem is not None and item.path != nextitem.path
    if machine.has_gpu():
        is_due = (is_due or tests_run % FROZEN_AFTER == 0) and gpu_bytes_in_use() <= CACHED_BYTES
    if is_due:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # an xdist worker, whose counts the main process prints
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, {})


class _Live:
    """Print each failure and each slow test as soon as it ends: a stopped run prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lines = []
        if report.failed:
            message = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
            lines.append(f"FAILED {report.nodeid} ({report.when}): {message.partition(chr(10))[0][:300]}")
        if report.duration > SLOW_SECONDS:
            lines.append(f"{report.duration:.1f} s {report.nodeid} ({report.when})")
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        for line in lines:
            reporter.write(f"\n{line}\n", flush=True)


class _FromWorkers:
    """Take the counts of deselected tests from the workers: each worker collects the same tests."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        left_out = getattr(node, "workeroutput", {}).get("left_out", {})
        node.config.stash[LEFT_OUT] = left_out or node.config.stash.get(LEFT_OUT, {})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    skipped = any(m.name == "skip" for m in item.iter_markers())
    alone, shard = item.get_closest_marker("alone") is not None, item.config.getoption("--shard")
    others = _shard(shard)[1] - 1 if shard else 0
    with nullcontext() if skipped else execution_lock(alone, others=others):
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
    """Return a GPU test's memory to the device, for the next test and for the other workers there.

    To look for garbage takes a quarter of a second: it is done where tests have left much memory since.
    """
    yield
    if not request.node.get_closest_marker("gpu"):
        return
    bytes_kept, in_use = request.config.stash.get(KEPT_BYTES, 0), gpu_bytes_in_use()
    if in_use > bytes_kept + CACHED_BYTES:
        gc.collect()
        bytes_kept = gpu_bytes_in_use()
    request.config.stash[KEPT_BYTES] = min(bytes_kept, in_use)
    release_unused_memory(CACHED_BYTES)


def gpu_bytes_in_use() -> int:
    """Return the bytes of this process's tensors on the current GPU."""
    torch = sys.modules.get("torch")
    return torch.cuda.memory_allocated() if torch is not None and torch.cuda.is_initialized() else 0


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a single thread (two on a shared core measure the scheduler) and a small cache to flush."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("weft.machine.l2_bytes", lambda kind: 1 << 20)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start headless Chromium; the test can read its console and its requests."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # The path of the driver is given, so that selenium does not search for one or download one.
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    yield driver
    driver.quit()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep compiled kernels and ceilings of this run in a temporary folder, apart from the user's cache.

    The workers of a run share the programs that NVRTC compiled, and the libraries that g++ compiled for
    emulators: their names have a hash of all that they were compiled from. ``WEFT_TEST_PROGRAMS`` names a
    folder with programs of an earlier run.
    """
    folder = tmp_path_factory.mktemp("weft-cache")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # a worker's lies in the run's
    programs = Path(os.environ.get("WEFT_TEST_PROGRAMS") or shared / "programs")
    programs.mkdir(parents=True, exist_ok=True)
    (folder / "cubin").symlink_to(programs.resolve())
    (shared / "libraries").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE_DIR", str(folder))
        patch.setenv("WEFT_TEST_LIBRARIES", str(shared / "libraries"))
        _no_limit_on_a_cpu()
        yield


@pytest.fixture
def cache_with_ceilings(tmp_path: Path) -> Path:
    """Return a new cache folder with a copy of this run's ceilings, so that no command measures them."""
    folder = tmp_path / "cache"
    shutil.copytree(Path(os.environ["WEFT_CACHE_DIR"]) / "ceilings", folder / "ceilings")
    return folder


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Make Triton's interpreter search for its functions once instead of at every call."""
    with pytest.MonkeyPatch.context() as patch:
        if not machine.has_gpu():
            search_once(patch)
        yield


def _no_limit_on_a_cpu() -> None:
    """Store CPU ceilings that no kernel reaches, so that no command measures them.

    Beside other tests a measurement takes ten seconds and is marked as doubtful, so that the next process
    would repeat it. GPU tests measure their own.
    """
    cpu = machine.query("cpu")
    rates = dict.fromkeys(("fp64", "fp32", "tf32", "bf16", "fp16"), 1e15)
    out_of_reach = Ceilings(
        device=cpu.name, copy=1e13, read=1e13, fill=1e13, matrix=rates, measured="never: a test's"
    )
    save(path_for(cpu), StoredCeilings(out_of_reach, "", machine.fingerprint("cpu")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which points came close to their tolerance, and how many tests were not run here, by reason."""
    if lines := margins.closest(terminalreporter.stats.get("passed", [])):
        terminalreporter.section("closest to their tolerance")
        terminalreporter.write("".join(f"{line}\n" for line in lines))
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
