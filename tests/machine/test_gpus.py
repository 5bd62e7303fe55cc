"""Several GPUs: the list with its links, and the selection of one. The driver and NVML are fakes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from weft.cli import device as page
from weft.cli import options
from weft.core import WeftError
from weft.machine import driver, nvml
from weft.machine.query import select_gpu

PCI = ["0000:19:00.0", "0000:3B:00.0", "0000:4C:00.0"]
GPU, SWITCH = 0, 2
VISIBLE = "CUDA_VISIBLE_DEVICES"


class ThreeCards:
    """A libcuda of three cards that obeys CUDA_VISIBLE_DEVICES. Card 2 is a peer of none."""

    def __init__(self) -> None:
        self.visible: list[int] = []
        self.starts = 0

    def cuInit(self, flags: int) -> int:
        self.starts += 1
        names = os.environ.get(VISIBLE, "0,1,2").split(",")
        self.visible = [int(n) for n in names if n in ("0", "1", "2")]
        return 0 if self.visible else 100

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = len(self.visible)
        return 0

    def cuDeviceGet(self, out: Any, ordinal: int) -> int:
        out._obj.value = self.visible[ordinal]
        return 0

    def cuDeviceGetName(self, text: Any, size: int, device: Any) -> int:
        text.value = f"Testcard {device.value}".encode()
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, size: int, device: Any) -> int:
        text.value = PCI[device.value].encode()
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, device: Any) -> int:
        out._obj.value = (80 + device.value) << 30
        return 0

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = 13010
        return 0

    def cuDeviceGetAttribute(self, out: Any, number: int, device: Any) -> int:
        out._obj.value = {75: 9, 76: 0}.get(number, 1)
        return 0

    def cuDeviceCanAccessPeer(self, out: Any, device: Any, peer: Any) -> int:
        out._obj.value = int(2 not in (device.value, peer.value))
        return 0


class NVMLError(Exception):
    pass


def nvml_of(remotes: dict[int, Any]) -> Any:
    """NVML of three cards; cards 0 and 1 have NVLinks with these far ends: (kind, PCI address)."""

    def state(handle: int, link: int) -> int:
        if link not in remotes:
            raise NVMLError("Not Supported")
        return 1

    def address(handle: int, link: int) -> Any:
        return SimpleNamespace(busId=remotes[link][1])

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        NVML_NVLINK_MAX_LINKS=18,
        NVML_FEATURE_ENABLED=1,
        NVML_NVLINK_DEVICE_TYPE_SWITCH=SWITCH,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByPciBusId=lambda pci: PCI.index(pci.decode()),
        nvmlDeviceGetP2PStatus=lambda a, b, kind: 5 if 2 in (a, b) or not remotes else 0,
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda handle, link: remotes[link][0],
        nvmlDeviceGetNvLinkRemotePciInfo=address,
    )


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreeCards]:
    three = ThreeCards()
    monkeypatch.setattr(driver, "library", lambda: three)
    monkeypatch.setattr(driver, "torch_cuda", lambda: "13.0")
    # Set first, so that monkeypatch restores the variable after the test selects a GPU.
    monkeypatch.setenv(VISIBLE, "")
    monkeypatch.delenv(VISIBLE)
    use_nvml(monkeypatch, nvml_of({}))
    driver.find.cache_clear()
    yield three
    driver.find.cache_clear()


def use_nvml(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    monkeypatch.setattr(nvml, "library", lambda: library)
    monkeypatch.setitem(sys.modules, "pynvml", library or SimpleNamespace(NVMLError=NVMLError))


def links() -> list[list[str]]:
    from weft.machine.gpus import list_gpus

    return [[link.text for link in gpu.links] for gpu in list_gpus()]


def test_every_gpu_is_listed_with_what_the_driver_knows_of_it(cards: ThreeCards) -> None:
    from weft.machine.gpus import list_gpus

    gpus = list_gpus()
    assert [(g.index, g.name, g.arch, g.pci) for g in gpus] == [
        (i, f"Testcard {i}", "sm_90", PCI[i]) for i in range(3)
    ]
    assert [g.memory_bytes for g in gpus] == [(80 + i) << 30 for i in range(3)]
    assert gpus[0].to_json()["links"] == [
        {"to": 1, "peer": True, "nvlinks": 0},
        {"to": 2, "peer": False, "nvlinks": 0},
    ]


FAR_ENDS = {
    "none": ({}, "PCIe"),
    "a switch": (dict.fromkeys(range(18), (SWITCH, "00000000:05:00.0")), "NV18"),
    # Four links to card 1, with its address as NVML writes it, and two to another card.
    "direct": (
        {n: (GPU, "00000000:3b:00.0" if n < 4 else b"00000000:5D:00.0") for n in range(6)},
        "NV4",
    ),
}


@pytest.mark.parametrize("far_end", FAR_ENDS)
def test_nvlinks_are_counted_from_one_gpu_to_another(
    cards: ThreeCards, monkeypatch: pytest.MonkeyPatch, far_end: str
) -> None:
    remotes, text = FAR_ENDS[far_end]
    use_nvml(monkeypatch, nvml_of(remotes))
    assert links()[0] == [text, "host"]
    assert links()[2] == ["host", "host"]


def test_without_nvml_the_kind_of_link_is_unknown_and_not_made_up(
    cards: ThreeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_nvml(monkeypatch, None)
    assert links() == [["peer", "host"], ["peer", "host"], ["host", "host"]]
    monkeypatch.setattr(cards, "cuDeviceCanAccessPeer", lambda *_: 1, raising=False)
    assert links() == [["?", "?"]] * 3


def test_the_table_has_a_column_for_the_links_to_each_gpu(cards: ThreeCards) -> None:
    from weft.machine.gpus import list_gpus

    table = page.gpus_table(list_gpus())
    assert table.column("to 0") == ["-", "PCIe", "host"]
    assert table.column("memory") == ["80 GiB", "81 GiB", "82 GiB"]


# ---- --device cuda:N


@pytest.mark.parametrize(
    ("visible", "device", "selected"),
    [(None, "cuda:1", "1"), ("2, 0", "cuda:0", "2"), ("2, 0", "cuda:1", "0")],
)
def test_a_gpu_is_selected_for_this_process_and_its_workers(
    cards: ThreeCards, monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, selected: str
) -> None:
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    context: Any = SimpleNamespace(resilient_parsing=False)
    assert options.select_device(context, device) == "cuda"
    assert os.environ[VISIBLE] == selected  # which worker processes inherit
    assert (driver.find().name, driver.find().count) == (f"Testcard {selected}", 1)


@pytest.mark.parametrize("device", ["cpu", "cuda", "tpu"])
def test_other_words_select_nothing(cards: ThreeCards, device: str) -> None:
    assert select_gpu(device) == device
    assert VISIBLE not in os.environ and cards.starts == 0


def test_a_shell_that_completes_a_line_selects_nothing(cards: ThreeCards) -> None:
    context: Any = SimpleNamespace(resilient_parsing=True)
    assert options.select_device(context, "cuda:1") == "cuda:1"
    assert VISIBLE not in os.environ and cards.starts == 0


@pytest.mark.parametrize(
    ("visible", "device", "message"),
    [
        (
            None,
            "cuda:3",
            "device cuda:3: expected cuda:0 to cuda:2, got none; hint: weft device lists the GPUs",
        ),
        ("1,2", "cuda:2", "device cuda:2: expected cuda:0 to cuda:1, got CUDA_VISIBLE_DEVICES=1,2"),
        ("", "cuda:0", "device cuda:0: expected a visible GPU, got CUDA_VISIBLE_DEVICES="),
        (None, "cuda:x", "device: expected cpu, cuda, or cuda:N with N from 0, got cuda:x"),
        (None, "cuda:-1", "device: expected cpu, cuda, or cuda:N"),
        (None, "cuda:", "device: expected cpu, cuda, or cuda:N"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_and_nothing_is_changed(
    cards: ThreeCards, monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, message: str
) -> None:
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    with pytest.raises(WeftError) as refused:
        select_gpu(device)
    assert message in str(refused.value)
    assert os.environ.get(VISIBLE) == visible


def test_no_choice_is_possible_after_cuda_has_started(cards: ThreeCards) -> None:
    assert driver.find().count == 3
    with pytest.raises(WeftError, match=r"before CUDA starts.*CUDA_VISIBLE_DEVICES=1"):
        select_gpu("cuda:1")


def test_every_command_with_a_device_takes_a_number() -> None:
    from importlib import import_module

    from weft.cli import COMMANDS, app

    modules = {n: vars(import_module(f"weft.cli.{n}")) for n in COMMANDS}
    commands = [n for n, names in modules.items() if {"Device", "select_device"} & set(names)]
    assert {"bench", "check", "demo", "device", "judge", "profile", "train", "tune"} <= set(commands)
    group: Any = typer.main.get_command(app)
    for name in commands:
        command = group.get_command(typer.Context(group), name)
        (option,) = (p for p in command.params if "--device" in p.opts)
        assert "cuda:N" in f"{option.metavar} {option.help}" and option.callback is not None
