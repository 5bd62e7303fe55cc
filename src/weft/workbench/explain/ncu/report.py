"""Report of the counters of a call: its kernels, traffic and bottleneck, as text and as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from weft.core import Cost, WeftError
from weft.workbench.explain.ncu import text
from weft.workbench.explain.ncu.counters import NEEDED
from weft.workbench.explain.ncu.kernel import Kernel
from weft.workbench.explain.ncu.rules import Bottleneck, Evidence, find_bottleneck
from weft.workbench.explain.ncu.traffic import Traffic, compare
from weft.workbench.report.scales import time

FORMAT = "weft ncu 1"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Counters of one call of an implementation at a case, in one direction.

    ``kernels`` are in launch order. ``cost`` is the operator's prediction. ``absent`` are counters that the
    tool or the device does not have. ``machine`` is the fingerprint, ``tool`` the tool's version, and
    ``l2_bytes`` the size of the L2.
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
        """Bottleneck of the longest kernel."""
        # The ratio is the call's: bytes are predicted for the operator, not for one of its kernels.
        return find_bottleneck(Evidence(kernel=self.longest, ratio=self.traffic.ratio))

    @property
    def good(self) -> bool:
        """True if the time and DRAM bytes of every kernel were counted, which every report needs."""
        return all(k.get(key) is not None for k in self.kernels for key in NEEDED)

    def lines(self) -> list[str]:
        """Return the table, the bytes against the prediction, and the bottleneck as lines of text."""
        count = len(self.kernels)
        total = time(sum(k.us for k in self.kernels))
        call = f"{self.operator} {self.implementation} {self.case} {self.direction}"
        lines = [f"{call}: {count} kernel{'s'[: count != 1]}, {total} of kernel time, caches cold"]
        lines += [*text.table(self.kernels), *self.traffic.lines()]
        # A kernel whose time was not counted has 0 us: no division by zero then.
        share = self.longest.us / sum(k.us for k in self.kernels) if self.longest.us else 1.0
        scope = f" (the longest kernel, {100 * share:.0f} % of the time)" if count > 1 else ""
        lines.append(f"bottleneck{scope}: {self.bottleneck.sentence}")
        if self.absent:
            lines.append(f"not counted here: {', '.join(self.absent)}")
        if not self.good:
            lines.append(f"not a complete profile: {', '.join(NEEDED)} are needed of every kernel")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return plain data, including the derived ``traffic`` and ``bottleneck``."""
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
        """Read the output of :meth:`to_json`; raises :class:`WeftError` for other data."""
        try:
            if data["format"] != FORMAT or not data["kernels"]:
                # For the handler below, which says what was expected.
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
                "not a profile by Nsight Compute",
                expected="the output of `weft profile --tool ncu --json`",
                got=f"{type(error).__name__}: {error}",
            ) from error
