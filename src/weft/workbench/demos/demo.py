"""What a demonstration is made of: two ways, the ratio that is expected, and what shows why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.core.errors import WeftError

if TYPE_CHECKING:
    import torch

    from weft.backends.nvrtc import CudaSource

Say = Callable[[str], None]
BAD, GOOD = "bad", "good"
SIDES = (BAD, GOOD)
# Where a piece of evidence comes from.
ARITHMETIC, CODE, COUNTED, TIMED = "arithmetic", "SASS", "Nsight Compute", "timed"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One of the two: its ``kernel``, what is particular to it in a few words, and the call.

    ``call(*inputs)`` gives the output, a new tensor, and launches exactly one kernel; demos that
    time themselves (``Demo.take``) have none.
    """

    kernel: str
    how: str
    call: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One figure of both ways: what was seen, and by what (``source``)."""

    label: str
    bad: float
    good: float
    source: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Counter:
    """What Nsight Compute is asked: ``metrics``, and the figure ``of`` their values.

    ``predicted`` is that figure for the bad and the good way by arithmetic; ``within`` is the
    share by which the counted one may differ.
    """

    label: str
    metrics: tuple[str, ...]
    of: Callable[[Mapping[str, float]], float]
    predicted: tuple[float, float]
    within: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The times of one way in microseconds, by which clock, and what else is known of them.

    ``samples`` are all of them; ``wrong`` says why the answer or the time is not to be had.
    """

    samples: tuple[float, ...] = ()
    warm: float | None = None
    flags: tuple[str, ...] = ()
    wrong: str = ""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A curve beside the pair: ``ys`` over ``xs``, as measured and as ``predicted``, and where to
    look (``marks`` of the x axis). ``us`` are the times that the ``ys`` were made of."""

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

    ``expected`` is how many times as long the bad way takes on a large data-centre GPU, as the
    arithmetic in ``because`` has it; ``at_least`` is what must be seen on any GPU for it to count
    as shown. ``inputs(seed)`` are a call's tensors on the GPU, ``reference(*inputs)`` its answer in
    float64, which both ways meet within ``tolerance``, absolute; 0 is bit for bit. ``facts(arch)``
    is the evidence that needs no GPU. ``clock`` says what the time is; ``take`` measures both
    ways, where the house's clock is not the one that shows it. ``see`` is what to look at.
    """

    name: str
    sentence: str
    source: CudaSource
    bad: Way
    good: Way
    expected: float
    because: str
    at_least: float
    see: str
    facts: Callable[[str], Sequence[Fact]]
    inputs: Callable[[int], list[torch.Tensor]] | None = None
    reference: Callable[..., torch.Tensor] | None = None
    tolerance: float = 0.0
    counter: Counter | None = None
    clock: str = "cold: inputs that are in no cache; launch gaps removed (docs/timing.md)"
    take: Callable[[Say], Mapping[str, Taken]] | None = None
    sweep: Callable[[Say], Sweep] | None = None
    files: tuple[Path, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.expected > self.at_least > 1:
            raise WeftError(
                f"the ratio of {self.name}",
                expected="expected > at_least > 1",
                got=f"{self.expected} and {self.at_least}",
            )
        object.__setattr__(self, "files", (self.source.file, self.source.file.with_suffix(".py")))

    def way(self, side: str) -> Way:
        return self.bad if side == BAD else self.good

    @property
    def code(self) -> str:
        """The kernels as they stand in the ``.cu``, without the comment that opens it."""
        lines = self.source.file.read_text().splitlines()
        begins = next(n for n, line in enumerate(lines) if not line.startswith("//"))
        return "\n".join(lines[begins:]).strip("\n")


def uniform(seed: int, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    """Floats of this shape on the GPU, uniform in [low, high)."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(*shape, generator=generator, device="cuda") * (high - low) + low


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Normal floats of this shape on the GPU."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda")


def elementwise(
    source: CudaSource, kernel: str, *, per_block: int, block: int = 256, more: Sequence[int] = ()
) -> Callable[..., torch.Tensor]:
    """The call of a kernel that gives an element for each of x, ``per_block`` of them a block."""

    def call(x: torch.Tensor) -> torch.Tensor:
        import torch

        y = torch.empty_like(x)
        source[kernel](x.numel() // per_block, block, x, y, *more)
        return y

    return call
