"""A demonstration: a bad and a good variant of one computation, the predicted ratio, and its evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.core.errors import WeftError
from weft.core.log import Log

if TYPE_CHECKING:
    import torch

    from weft.backends.nvrtc import CudaSource
    from weft.lab.demos.chain import Chain

BAD, GOOD = "bad", "good"
SIDES = (BAD, GOOD)
# Sources of a piece of evidence.
ARITHMETIC, CODE, COUNTED, TIMED = "arithmetic", "SASS", "Nsight Compute", "timed"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One side of a demonstration: its ``kernel``, its difference in a few words (``how``), and the call.

    ``call(*inputs)`` returns the output, a new tensor, and launches exactly one kernel. Demos that
    measure themselves (``Demo.measure``) have no call.
    """

    kernel: str
    how: str
    call: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One piece of evidence: a number for each variant, and the ``source`` that it comes from."""

    label: str
    bad: float
    good: float
    source: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Counter:
    """Hardware counters: the ``metrics`` to read with Nsight Compute, and the number ``of`` their values.

    ``predicted`` is that number for the bad and the good variant by arithmetic; ``within`` is the
    relative difference that the counted one may have.
    """

    label: str
    metrics: tuple[str, ...]
    of: Callable[[Mapping[str, float]], float]
    predicted: tuple[float, float]
    within: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """All ``samples`` of one variant in microseconds, and its warm time, if there is one.

    ``wrong`` is the reason why there is no time: a wrong output or a failed measurement.
    """

    samples: tuple[float, ...] = ()
    warm: float | None = None
    flags: tuple[str, ...] = ()
    wrong: str = ""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A curve beside the pair: ``ys`` over ``xs``, measured and ``predicted``.

    ``marks`` are positions on the x axis with labels; ``us`` are the times that the ``ys`` come from.
    """

    title: str
    x: str
    y: str
    says: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    predicted: tuple[float, ...]
    us: tuple[float, ...]
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Demo:
    """A demonstration.

    ``expected`` is the predicted ratio of the bad to the good time on a large data-centre GPU, with
    its arithmetic in ``because``; ``at_least`` is the ratio from which it counts as shown on any GPU.
    ``inputs(seed)`` returns a call's tensors on the GPU, and ``reference(*inputs)`` its output in
    float64. Both variants must match it within ``tolerance``, absolute; 0 means bit for bit.
    ``facts(arch)`` is the evidence that needs no GPU. ``clock`` describes the time that is compared.
    ``measure`` times both variants if the project's own timing would hide the effect. ``see`` is what
    to look at. A demo of operators instead of kernels has a ``listing`` in Python and no ``source``, and its
    ``chain`` has the bytes that each of its implementations moves.
    """

    name: str
    sentence: str
    source: CudaSource | None
    bad: Variant
    good: Variant
    expected: float
    because: str
    at_least: float
    see: str
    facts: Callable[[str], Sequence[Fact]]
    inputs: Callable[[int], list[torch.Tensor]] | None = None
    reference: Callable[..., torch.Tensor] | None = None
    tolerance: float = 0.0
    counter: Counter | None = None
    clock: str = "cold: inputs that are in no cache; launch gaps removed (weft help time)"
    measure: Callable[[Log], Mapping[str, Measurement]] | None = None
    sweep: Callable[[Log], Sweep] | None = None
    listing: str = ""
    chain: Chain | None = None
    files: tuple[Path, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.expected > self.at_least > 1:
            raise WeftError(
                f"the ratio of {self.name}",
                expected="expected > at_least > 1",
                got=f"{self.expected} and {self.at_least}",
            )
        if (self.source is None) != bool(self.listing):
            expected = "either CUDA source or a listing"
            raise WeftError(f"the code of {self.name}", expected=expected, got="both or none")
        module = Path(__file__).with_name(f"{self.name.replace('-', '_')}.py")
        object.__setattr__(self, "files", (self.source.file, module) if self.source else (module,))

    def variant(self, side: str) -> Variant:
        return self.bad if side == BAD else self.good

    @property
    def code(self) -> str:
        """The text of the ``.cu`` without the comment that opens it, or the listing."""
        if self.source is None:
            return self.listing
        lines = self.source.file.read_text().splitlines()
        start = next(n for n, line in enumerate(lines) if not line.startswith("//"))
        return "\n".join(lines[start:]).strip("\n")


def uniform(seed: int, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    """Generate floats of this shape on the GPU, uniform in [low, high)."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(*shape, generator=generator, device="cuda") * (high - low) + low


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Generate normal floats of this shape on the GPU."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda")


def elementwise(
    source: CudaSource, kernel: str, *, per_block: int, block: int = 256, scalars: Sequence[int] = ()
) -> Callable[..., torch.Tensor]:
    """Return the call of an elementwise kernel: a block computes ``per_block`` elements of y from x."""

    def call(x: torch.Tensor) -> torch.Tensor:
        import torch

        y = torch.empty_like(x)
        source[kernel](x.numel() // per_block, block, x, y, *scalars)
        return y

    return call
