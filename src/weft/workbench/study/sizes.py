"""Which sizes an MLP is timed at: four lists, of which one varies while the others stand still.

The others stand at the middle of their list, so that a list says its base too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from weft.core import WeftError
from weft.workbench.study.cost import PHASES, Shape, resident_bytes

LEAST = {"depths": 3, "widths": 3, "batches": 5, "steps": 3}  # points that a fit needs
SWEEPS = ("steps", "layers", "width", "batch")


@dataclass(frozen=True)
class Point:
    """What is timed: ``steps`` training steps in a row (``phase`` step), or one forward alone."""

    shape: Shape
    phase: str
    steps: int = 1

    @property
    def title(self) -> str:
        shape, steps = self.shape, f" x {self.steps}" if self.steps > 1 else ""
        size = f"batch {shape.batch}, {shape.depth} layers of {shape.width}"
        return f"{self.phase}{steps}, {size}, {shape.dtype}"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The four lists, rising; raises :class:`WeftError` where one is too short for its fit."""

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    batches: tuple[int, ...]
    steps: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        for word, least in LEAST.items():
            values = getattr(self, word)
            rising = all(a < b for a, b in pairwise(values))
            if len(values) < least or values[0] < 1 or not rising:
                wanted = f"{least} or more whole numbers from 1, rising"
                raise WeftError(f"--{word}", expected=wanted, got=list(values))
        self.base  # noqa: B018 - a dtype that is none is refused here

    @property
    def base(self) -> Shape:
        return Shape(
            batch=middle(self.batches),
            depth=middle(self.depths),
            width=middle(self.widths),
            dtype=self.dtype,
        )

    def sweeps(self) -> dict[str, list[Point]]:
        """The points of each sweep in rising order, every phase's; the base is in all of them."""
        base = self.base
        shapes = {
            "layers": [_with(base, depth=d) for d in self.depths],
            "width": [_with(base, width=w) for w in self.widths],
            "batch": [_with(base, batch=b) for b in self.batches],
        }
        found = {"steps": [Point(base, "step", n) for n in self.steps]}
        for name, each in shapes.items():
            found[name] = [Point(shape, phase) for phase in PHASES for shape in each]
        return found

    def points(self) -> list[Point]:
        """Every point once, though it stand in several sweeps."""
        return list(dict.fromkeys(p for points in self.sweeps().values() for p in points))

    def depth_at(self, width: int) -> int:
        """The layers that a model of this width is made with: all depths are timed at the base."""
        return max(self.depths) if width == self.base.width else self.base.depth

    def memory(self) -> int:
        """Bytes that all of it takes at once: each width's weights, gradients and two moments,
        and once more what a captured step holds for itself."""
        models = sum(
            4 * self.depth_at(w) * _with(self.base, width=w).layer_bytes for w in self.widths
        )
        held = sum(resident_bytes(p.shape, p.phase) // 2 for p in self.points())
        return models + held


def middle(values: Sequence[int]) -> int:
    """The element in the middle, the upper one of two."""
    return values[len(values) // 2]


def _with(base: Shape, **change: int) -> Shape:
    words = {"batch": base.batch, "depth": base.depth, "width": base.width} | change
    return Shape(**words, dtype=base.dtype)


def default(device: str, quick: bool = False, dtype: str | None = None) -> Sizes:
    """The sizes of a device ('cuda' or 'cpu'): weights that outgrow the last-level cache at the
    base, and batches on both sides of the turn. ``quick`` is small and shows no such thing."""
    if quick:
        return Sizes(
            depths=(1, 2, 3),
            widths=(64, 128, 256),
            batches=(1, 4, 16, 64, 256),
            steps=(1, 2, 3),
            dtype=dtype or ("bf16" if device == "cuda" else "fp32"),
        )
    if device == "cuda":
        return Sizes(
            depths=(4, 8, 16, 24, 32),
            widths=(512, 1024, 2048, 4096, 6144, 8192),
            batches=tuple(2**i for i in range(13)),
            steps=(1, 2, 4, 8, 16),
            dtype=dtype or "bf16",
        )
    return Sizes(
        depths=(8, 10, 12, 16, 20),
        widths=(256, 512, 1024, 1536, 2048, 2560),
        batches=tuple(2**i for i in range(10)),
        steps=(1, 2, 4, 8),
        dtype=dtype or "fp32",
    )
