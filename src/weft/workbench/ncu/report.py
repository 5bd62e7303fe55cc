"""A profile as data: what was counted of each kernel of a call, and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from weft.core import Cost, WeftError
from weft.workbench.ncu import words
from weft.workbench.ncu.counters import NEEDED
from weft.workbench.ncu.kernel import Kernel
from weft.workbench.ncu.rules import Bottleneck, Seen, name
from weft.workbench.ncu.traffic import Traffic, compare
from weft.workbench.report.scales import time

FORMAT = "weft ncu 1"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What Nsight Compute counted of one call of an implementation at a case, in one direction.

    ``kernels`` stand in the order of their launches; ``cost`` is the operator's prediction;
    ``absent`` are counters that the tool or the device does not have; ``machine`` is the
    fingerprint, ``tool`` the tool's version, ``l2_bytes`` the size of the L2.
    """

    operator: str
    implementation: str
    backend: str
    case: str
    direction: str
    kernels: tuple[Kernel, ...]
    cost: Cost
    l2_bytes: int | None = None
    absent: tuple[str, ...] = ()
    tool: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def traffic(self) -> Traffic:
        return compare(self.kernels, self.cost, self.l2_bytes)

    @property
    def longest(self) -> Kernel:
        return max(self.kernels, key=lambda k: k.us)

    @cached_property
    def bottleneck(self) -> Bottleneck:
        """That of the kernel which takes the most time."""
        return name(Seen(kernel=self.longest, ratio=self.traffic.ratio))

    @property
    def good(self) -> bool:
        """Whether time and DRAM bytes of every kernel were counted: the least that a profile is."""
        return all(k.get(key) is not None for k in self.kernels for key in NEEDED)

    def lines(self) -> list[str]:
        """The table, then sentences: bytes against the prediction, and the bottleneck."""
        count = len(self.kernels)
        whole = time(sum(k.us for k in self.kernels))
        what = f"{self.operator} {self.implementation} {self.case} {self.direction}"
        found = [f"{what}: {count} kernel{'s'[: count != 1]}, {whole} of kernel time, caches cold"]
        found += [*words.table(self.kernels), *self.traffic.lines()]
        part = self.longest.us / sum(k.us for k in self.kernels) if self.longest.us else 1.0
        most = f" (the longest kernel, {100 * part:.0f} % of the time)" if count > 1 else ""
        found.append(f"bottleneck{most}: {self.bottleneck.sentence}")
        if self.absent:
            found.append(f"not counted here: {', '.join(self.absent)}")
        if not self.good:
            found.append(f"not a whole profile: {', '.join(NEEDED)} are needed of every kernel")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data; what follows from the rest (``traffic``, ``bottleneck``) is told as well."""
        cost = self.cost
        return {
            "format": FORMAT,
            "operator": self.operator,
            "implementation": self.implementation,
            "backend": self.backend,
            "case": self.case,
            "direction": self.direction,
            "kernels": [k.to_json() for k in self.kernels],
            "cost": {
                "read": cost.read,
                "written": cost.written,
                "flops": cost.flops,
                "rate": cost.rate,
            },
            "l2_bytes": self.l2_bytes,
            "absent": list(self.absent),
            "tool": self.tool,
            "machine": dict(self.machine),
            "traffic": self.traffic.to_json(),
            "bottleneck": {
                "name": self.bottleneck.name,
                "sentence": self.bottleneck.sentence,
            },
            "good": self.good,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Report:
        """What :meth:`to_json` wrote; raises :class:`WeftError` on another shape."""
        try:
            if data["format"] != FORMAT or not data["kernels"]:
                raise KeyError("format")
            texts = ("operator", "implementation", "backend", "case", "direction", "tool")
            return Report(
                **{key: str(data[key]) for key in texts},
                kernels=tuple(map(Kernel.from_json, data["kernels"])),
                cost=Cost(**data["cost"]),
                l2_bytes=data["l2_bytes"],
                absent=tuple(data["absent"]),
                machine=data["machine"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WeftError(
                "not a profile of Nsight Compute's",
                expected="what `weft profile --tool ncu --json` wrote",
                got=f"{type(error).__name__}: {error}",
            ) from error
