"""Facts about the machine: known properties, measured ceilings, and no invented values for unknown ones."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft import machine
from weft.core import YES, Ceilings, WeftError, no
from weft.core.implementation import BACKENDS
from weft.machine import clocks, cpu, datasheet, driver, gpu, nvml

SRC = Path(machine.__file__).resolve().parents[2]


def test_the_cpu_is_described() -> None:
    d = machine.query("cpu")
    assert (d.kind, bool(d.name)) == ("cpu", True)
    assert d.threads is not None and 1 <= d.threads <= (os.cpu_count() or 1)
    assert machine.l2_bytes("cpu") >= 1 << 18
    assert json.loads(json.dumps(d.to_json()))["kind"] == "cpu"
    with pytest.raises(dataclasses.FrozenInstanceError):
        d.name = "another"  # type: ignore[misc]


def test_a_machine_without_information_is_unknown_not_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "_read", lambda path: None)
    monkeypatch.setattr(cpu, "caches", dict)
    d = cpu.describe()
    assert (d.units, d.clock_mhz, d.l2_bytes, d.vectors) == (None, None, None, ())
    assert d.name


def test_caches_that_cores_share_are_counted_once(tmp_path: Path) -> None:
    layout = {0: ("0", "0-1"), 1: ("1", "0-1"), 2: ("2", "2-3"), 3: ("3", "2-3")}
    for core, (own, shared) in layout.items():
        files = [("1", "Data", "32K", own), ("1", "Instruction", "32K", own)]
        files += [("3", "Unified", "16M", shared), ("4", "Unified", "garbage", shared)]
        for number, texts in enumerate(files):
            index = tmp_path / f"cpu{core}" / "cache" / f"index{number}"
            index.mkdir(parents=True)
            for name, text in zip(("level", "type", "size", "shared_cpu_list"), texts, strict=True):
                (index / name).write_text(text + "\n")
    assert cpu.caches(tmp_path) == {"L1d": 4 * 32 << 10, "L3": 2 * 16 << 20}
    assert cpu.caches(tmp_path / "missing") == {}


def test_unknown_device_words_say_what_was_expected() -> None:
    with pytest.raises(WeftError, match=r"expected cuda or cpu, got tpu"):
        machine.query("tpu")
    if not machine.has_gpu():
        with pytest.raises(WeftError) as error:
            machine.query("cuda")
        assert error.value.hint == machine.gpu_reason()


class FakeDriver:
    """A libcuda of one card, answering through pointers as the real one does."""

    def __init__(self, init: int = 0, count: int = 1) -> None:
        self.init, self.count = init, count
        attributes = {"major": 9, "minor": 0, "sms": 132, "l2_bytes": 50 << 20, "clock_khz": 1_980_000}
        self.by_number = {driver.ATTRIBUTES[word]: value for word, value in attributes.items()}

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = self.count
        return 0

    def cuDeviceGet(self, out: Any, ordinal: int) -> int:
        out._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, text: Any, size: int, device: Any) -> int:
        text.value = b"NVIDIA Testcard"
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, size: int, device: Any) -> int:
        text.value = b"0000:19:00.0"
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, device: Any) -> int:
        out._obj.value = 141 << 30
        return 0

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = 13010
        return 0

    def cuDeviceGetAttribute(self, out: Any, number: int, device: Any) -> int:
        if number not in self.by_number:
            return 1  # CUDA_ERROR_INVALID_VALUE, as an old driver gives for a new attribute
        out._obj.value = self.by_number[number]
        return 0


class NVMLError(Exception):
    pass


def fake_nvml(mask: int = 0x4 | 0x1, broken: bool = False) -> SimpleNamespace:
    def refuse(*arguments: object) -> None:
        raise NVMLError("Not Supported")

    def clock(handle: object, which: int) -> int:
        return {1: 1755, 2: 3201}[which]

    answers: dict[str, Any] = {
        "nvmlDeviceGetHandleByPciBusId": lambda pci: ("handle", pci),
        "nvmlSystemGetDriverVersion": lambda: "590.10",
        "nvmlDeviceGetEccMode": lambda handle: (1, 1),
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetClockInfo": clock,
        "nvmlDeviceGetMaxClockInfo": lambda handle, which: 1980,
        "nvmlDeviceGetPowerUsage": lambda handle: 612_500,
        "nvmlDeviceGetTemperature": lambda handle, which: 61,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: mask,
    }
    if broken:
        answers |= {name: refuse for name in answers if "Handle" not in name}
    numbers = {"NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2, "NVML_TEMPERATURE_GPU": 0}
    return SimpleNamespace(NVMLError=NVMLError, **numbers, **answers)


@pytest.fixture
def one_card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    card = driver._ask(FakeDriver())  # type: ignore[arg-type]
    library = fake_nvml()
    monkeypatch.setattr(driver, "find", lambda: card)
    monkeypatch.setattr(nvml, "library", lambda: library)
    monkeypatch.setattr(nvml, "handle", nvml.handle.__wrapped__)
    monkeypatch.setitem(sys.modules, "pynvml", library)  # type: ignore[arg-type]
    monkeypatch.setattr(clocks, "known_kind", lambda kind: "cuda")
    return monkeypatch


def test_a_gpu_is_described_from_driver_and_nvml(one_card: pytest.MonkeyPatch) -> None:
    d = gpu.describe()
    assert (d.name, d.arch, d.units, d.l2_bytes) == ("NVIDIA Testcard", "sm_90", 132, 50 << 20)
    assert (d.memory_bytes, d.driver, d.driver_cuda) == (141 << 30, "590.10", "13.1")
    assert (d.clock_mhz, d.clock_max_mhz, d.ecc, d.power_limit_w) == (1755, 1980, True, 700)
    assert d.warp is None and d.shared_per_block_optin is None  # an unknown value is None


def test_the_card_asked_is_cudas_first_and_every_question_exists(
    one_card: pytest.MonkeyPatch,
) -> None:
    assert nvml.handle() == ("handle", b"0000:19:00.0")
    one_card.undo()
    import pynvml

    assert [name for name in vars(fake_nvml()) if not hasattr(pynvml, name)] == []


def test_a_card_that_answers_nothing_is_still_described(one_card: pytest.MonkeyPatch) -> None:
    library = fake_nvml(broken=True)
    one_card.setattr(nvml, "library", lambda: library)
    d = gpu.describe()
    assert (d.clock_mhz, d.driver, d.power_limit_w) == (None, None, None)
    assert d.clock_max_mhz == 1980  # the driver's figure is used instead
    reading = clocks.Sampler("cuda").read()
    assert reading == dict.fromkeys(("sm_mhz", "mem_mhz", "power_w", "temp_c")) | {"throttle": []}


def test_a_gpus_page_shows_what_is_known_and_what_is_not(
    one_card: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from weft.cli import device as page

    ceilings = Ceilings(
        device="x", copy=4.2e12, read=4.4e12, fill=4e12, matrix={"bf16": 7.4e14}, measured="today"
    )
    peaks = datasheet.look_up("NVIDIA H200")
    support = {"eager": YES, "numba": no("numba [cuda] is not installed")}
    page.show(gpu.describe(), ceilings, peaks, support, machine.fingerprint("cpu"), "")
    page.show(gpu.describe(), None, None, support, machine.fingerprint("cpu"), "")
    known, _, unknown = capsys.readouterr().out.rpartition("NVIDIA Testcard")
    for text in ("sm_90", "132", "1,755 MHz (maximum 1,980 MHz)", "4,200 GB/s", "87.5 %", "74.8 %", "[cuda]"):
        assert text in known
    assert "not guessed" in unknown and "weft device --measure" in unknown
    assert "%" not in unknown


def test_the_sampler_reads_and_decodes(one_card: pytest.MonkeyPatch) -> None:
    assert clocks.Sampler("cuda").read() == {
        "sm_mhz": 1755,
        "mem_mhz": 3201,
        "power_w": 612.5,
        "temp_c": 61,
        "throttle": ["sw_power_cap"],
    }


def test_the_sampler_is_empty_on_a_cpu() -> None:
    assert clocks.Sampler("cpu").read() == {}


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0, []),
        (0x1 | 0x2 | 0x100, []),  # idle, and clocks set by a user: no throttling
        (0x4 | 0x20, ["sw_power_cap", "sw_thermal"]),
        (0x8 | 0x40 | 0x80, ["hw_slowdown", "hw_thermal", "hw_power_brake"]),
        (0x10 | 1 << 40, ["sync_boost", "reason_0x10000000000"]),
    ],
)
def test_throttle_reasons_as_words(mask: int, words: list[str]) -> None:
    assert clocks.throttle_words(mask) == words


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    find = driver.find.__wrapped__
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for library, reason in (
        (None, "no NVIDIA driver is installed"),
        (FakeDriver(init=803), "error 803"),
        (FakeDriver(count=0), "sees no GPU"),
        (ctypes.CDLL(None), "incomplete"),  # a library without the driver's functions
    ):
        monkeypatch.setattr(driver, "library", lambda library=library: library)
        assert reason in find().reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in find().reason


def test_a_hanging_driver_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    hung = SimpleNamespace(cuInit=lambda flags: release.wait(60) and 999)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(driver, "library", lambda: hung)
    monkeypatch.setattr(driver, "TIMEOUT", 0.05)
    try:
        assert "no answer" in driver.find.__wrapped__().reason
    finally:
        release.set()


@pytest.mark.parametrize("reason", ["", "the NVIDIA driver sees no GPU"])
def test_the_first_gpu_s_context_is_created_in_a_thread(reason, monkeypatch):
    calls = []

    class Library:
        def cuDeviceGet(self, device, index):
            calls.append(("device", index))
            return 0

        def cuDevicePrimaryCtxRetain(self, context, device):
            calls.append(("retain", device.value))
            return 0

    monkeypatch.setattr(driver, "library", Library)
    monkeypatch.setattr(driver, "find", lambda: driver.DriverInfo(count=1, reason=reason))
    thread = driver.open_in_background()
    if reason:
        assert thread is None and not calls
    else:
        thread.join(10)
        assert calls == [("device", 0), ("retain", 0)]


def test_a_gpu_that_torch_cannot_use_is_no_gpu(one_card: pytest.MonkeyPatch) -> None:
    reason = importlib.import_module("weft.machine.query").gpu_reason.__wrapped__
    one_card.setattr(driver, "torch_cuda", lambda: None)
    assert "not built for CUDA" in reason()
    one_card.setattr(driver, "torch_cuda", lambda: "13.0")
    assert reason() == ""


def python(code: str, folder: Path, **environment: str) -> Any:
    """Run ``code`` in a new process with ``folder`` on the path and no WEFT_ variables; return its JSON."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WEFT_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


FINGERPRINT = (
    "import json, sys; from weft import machine; "
    "print(json.dumps([machine.fingerprint('cpu'), [m for m in ('torch', 'triton', 'numba') "
    "if m in sys.modules]]))"
)


@pytest.fixture
def untracked_package(tmp_path: Path) -> Path:
    """Copy the package to a folder outside any git repository."""
    for part in ("core", "machine"):
        shutil.copytree(SRC / "weft" / part, tmp_path / "weft" / part)
    shutil.copy(SRC / "weft" / "__init__.py", tmp_path / "weft")
    return tmp_path


def test_fingerprint_outside_git(untracked_package: Path) -> None:
    fingerprint, heavy = python(FINGERPRINT, untracked_package)
    assert (fingerprint["commit"], fingerprint["dirty"]) == (None, None)
    assert heavy == []
    assert fingerprint["versions"]["torch"] and fingerprint["versions"]["weft"]
    assert fingerprint["date"][-6] in "+-"  # with a time zone
    fingerprint, _ = python(FINGERPRINT, untracked_package, WEFT_COMMIT="abc123")
    assert (fingerprint["commit"], fingerprint["dirty"]) == ("abc123", False)
    fingerprint, _ = python(FINGERPRINT, untracked_package, WEFT_COMMIT="abc123-dirty")
    assert (fingerprint["commit"], fingerprint["dirty"]) == ("abc123", True)


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_fingerprint_in_git(untracked_package: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        command = ["git", "-C", str(untracked_package), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    (untracked_package / ".gitignore").write_text("__pycache__\n")
    git("add", ".gitignore")
    git("commit", "-q", "-m", "somebody else's work")
    # The package is inside a checkout that does not track it, as in a virtual environment.
    assert python(FINGERPRINT, untracked_package)[0]["commit"] is None
    git("add", "weft")
    git("commit", "-q", "-m", "weft itself")
    fingerprint, _ = python(FINGERPRINT, untracked_package)
    assert (fingerprint["commit"], fingerprint["dirty"]) == (git("rev-parse", "HEAD"), False)
    (untracked_package / "results.jsonl").write_text("{}\n")  # a record beside the source is no change
    assert python(FINGERPRINT, untracked_package)[0]["dirty"] is False
    with (untracked_package / "weft" / "core" / "cost.py").open("a") as file:
        file.write("# changed\n")
    assert python(FINGERPRINT, untracked_package)[0]["dirty"] is True


def test_device_command(tmp_path: Path) -> None:
    code = "import sys; from weft.cli import main; sys.argv[0] = 'weft'; main()"
    environment = {**os.environ, "PYTHONPATH": str(SRC), "WEFT_CACHE_DIR": str(tmp_path)}

    def weft(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    done = weft("device", "--json", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["device"]["kind"] == answer["machine"]["kind"] == "cpu"
    assert answer["ceilings"] is None  # no measurement without a request
    assert len(answer["gpus"]) == driver.find().count
    assert [b["name"] for b in answer["backends"]] == list(BACKENDS)
    assert all(b["reason"] for b in answer["backends"] if not (b["supported"] and b["timed"]))
    done = weft("device", "--device", "cpu")
    assert done.returncode == 0 and "--measure" in done.stdout and "\x1b" not in done.stdout
    done = weft("device", "--device", "tpu")
    assert done.returncode == 2 and "expected cuda or cpu" in done.stderr and not done.stdout


@pytest.mark.gpu
@pytest.mark.alone
def test_the_gpu_here_is_known_and_its_ceilings_stand_below_the_datasheet() -> None:
    import torch

    d = machine.query("cuda")
    properties = torch.cuda.get_device_properties(0)
    assert (d.name, d.units) == (properties.name, properties.multi_processor_count)
    assert d.l2_bytes == properties.L2_cache_size
    for word in ("warp", "bus_width_bits", "shared_per_block_optin", "registers_per_sm", "driver"):
        assert getattr(d, word), word
    reading = clocks.Sampler("cuda").read()
    assert reading["sm_mhz"] and reading["power_w"] and isinstance(reading["throttle"], list)
    before = torch.backends.cuda.matmul.fp32_precision
    ceilings = machine.ceilings("cuda")
    assert torch.backends.cuda.matmul.fp32_precision == before
    assert ceilings is not None and ceilings.matrix["fp32"] < ceilings.matrix["bf16"]
    peaks = datasheet.look_up(d.name)
    if peaks and peaks.bandwidth:
        assert 0.7 < ceilings.copy / peaks.bandwidth < 1
        assert 0.7 < ceilings.read / peaks.bandwidth < 1.0
        for rate in set(ceilings.matrix) & set(peaks.matrix):
            assert 0.4 < ceilings.matrix[rate] / peaks.matrix[rate] < 1.05, rate
