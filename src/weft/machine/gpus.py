"""Every GPU that CUDA sees here, and the links between them: peer access by the driver, NVLink by NVML."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weft.machine import driver, nvml


@dataclass(frozen=True, kw_only=True)
class Link:
    """The way from one GPU to the GPU ``to``.

    ``peer`` is True if kernels can access that GPU's memory directly. ``nvlinks`` is the number of active
    NVLinks that lead there, directly or through a switch: 0 means PCIe alone. None means unknown.
    """

    to: int
    peer: bool | None
    nvlinks: int | None

    @property
    def text(self) -> str:
        """``NV18`` for 18 NVLinks, ``PCIe``, ``host`` if copies go through the host's memory, or ``?``."""
        if self.peer is None:
            return "?"
        if not self.peer:
            return "host"
        return f"NV{self.nvlinks}" if self.nvlinks else "PCIe" if self.nvlinks == 0 else "peer"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU by its CUDA index. ``memory_bytes`` is its whole memory; None means unknown."""

    index: int
    name: str | None
    arch: str | None
    memory_bytes: int | None
    pci: str | None
    links: tuple[Link, ...] = ()

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["links"] = [asdict(link) for link in self.links]
        return data


def list_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs in CUDA's order; none without a driver. ``CUDA_VISIBLE_DEVICES`` hides others."""
    count = driver.find().count
    identities = [driver.identify(index) for index in range(count)]
    return tuple(
        Gpu(
            index=index,
            name=identity.name,
            arch=identity.arch,
            memory_bytes=identity.memory_bytes,
            pci=identity.pci,
            links=tuple(
                Link(
                    to=other,
                    peer=driver.can_access_peer(index, other),
                    nvlinks=_count_nvlinks(identity.pci, identities[other].pci),
                )
                for other in range(count)
                if other != index
            ),
        )
        for index, identity in enumerate(identities)
    )


def _count_nvlinks(pci: str | None, other_pci: str | None) -> int | None:
    """Return the number of active NVLinks from one GPU to another; None if NVML does not know."""
    lib, handle, other = nvml.library(), nvml.handle_of(pci), nvml.handle_of(other_pci)
    if lib is None or handle is None or other is None or other_pci is None:
        return None
    status = nvml.ask(lib.nvmlDeviceGetP2PStatus, handle, other, lib.NVML_P2P_CAPS_INDEX_NVLINK)
    if status != lib.NVML_P2P_STATUS_OK:
        return None if status is None else 0
    count = 0
    for link in range(lib.NVML_NVLINK_MAX_LINKS):
        if nvml.ask(lib.nvmlDeviceGetNvLinkState, handle, link) != lib.NVML_FEATURE_ENABLED:
            continue
        kind = nvml.ask(lib.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        remote = nvml.ask(lib.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        # A link to a switch leads to every GPU of the host.
        if kind == lib.NVML_NVLINK_DEVICE_TYPE_SWITCH or (
            remote is not None and _same_pci(remote.busId, other_pci)
        ):
            count += 1
    return count or None


def _same_pci(a: str | bytes, b: str) -> bool:
    """True for two texts of one PCI address: NVML writes the domain in eight digits, CUDA in four."""
    text = a.decode() if isinstance(a, bytes) else a
    (domain, _, rest), (other_domain, _, other_rest) = (t.lower().partition(":") for t in (text, b))
    return int(domain, 16) == int(other_domain, 16) and rest == other_rest
