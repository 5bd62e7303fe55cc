"""How a run is trained: one frozen dataclass, and what each size of model begins with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from weft.core import WeftError

DTYPES, STRATEGIES = ("float32", "bfloat16"), ("ddp", "fsdp")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run's numbers. What is None is left out, or chosen by the device where it says so.

    Attributes:
        steps: updates of the weights.
        batch: sequences a step, over all processes and micro-batches.
        length: tokens a sequence.
        accumulate: micro-batches that each process splits its part of a batch into.
        lr, warmup, lr_floor: the highest learning rate, the steps until it is reached, and the
            share of it at the last step (``schedule.cosine``).
        weight_decay, beta1, beta2, eps: AdamW's.
        clip: the most that the norm of all gradients may be; None clips nothing.
        seed: of the weights, the order of the text, dropout and the samples.
        dtype: of weights and activations, float32 or bfloat16, which keeps float32 masters.
        compile: whether the model goes through ``torch.compile``.
        graph: whether a micro-batch's kernels are launched as one CUDA graph where that can be: on
            one GPU, with neither dropout nor ``compile``.
        strategy: how several processes share the work, ddp or fsdp.
        reshard: whether fsdp gathers weights before each forward and backward and drops them after,
            2 bytes a parameter less in bfloat16; None: above a billion parameters.
        validate_every, validate_batches: steps between validations, and batches of one.
        sample_every, sample_tokens: steps between samples, and tokens of one.
        checkpoint_every, checkpoint_seconds: steps and seconds between checkpoints; the last step
            writes one in any case.
        keep: checkpoints that are kept, the newest.
        outlier_z, outlier_window: a step whose loss or gradient norm is more than this many
            standard deviations above the mean of that many steps is skipped.
        patience: so many skipped steps in a row end the run.
        tensorboard, picture: whether TensorBoard's log is written, and the losses drawn at the end,
            where what does it is installed.

    Raises:
        WeftError: a value outside its range.
    """

    steps: int
    batch: int
    length: int
    accumulate: int = 1
    lr: float = 6e-4
    warmup: int = 0
    lr_floor: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float | None = 1.0
    seed: int = 0
    dtype: str = "float32"
    compile: bool = False
    graph: bool = True
    strategy: str = "ddp"
    reshard: bool | None = None
    validate_every: int | None = None
    validate_batches: int = 8
    sample_every: int | None = None
    sample_tokens: int = 400
    checkpoint_every: int | None = None
    checkpoint_seconds: float | None = 600.0
    keep: int = 2
    outlier_z: float | None = 8.0
    outlier_window: int = 128
    patience: int = 10
    tensorboard: bool = True
    picture: bool = True

    def __post_init__(self) -> None:
        for name in COUNTS:
            self._hold(name, lambda v: isinstance(v, int) and v >= 1, "a whole number, 1 or more")
        for name in ("lr", "eps", "clip", "checkpoint_seconds", "outlier_z"):
            self._hold(name, lambda v: v > 0, "above 0")
        for name in ("warmup", "weight_decay", "seed"):
            self._hold(name, lambda v: v >= 0, "0 or more")
        for name in ("beta1", "beta2"):
            self._hold(name, lambda v: 0 <= v < 1, "from 0 to below 1")
        self._hold("lr_floor", lambda v: 0 <= v <= 1, "from 0 to 1")
        self._hold("outlier_window", lambda v: v >= 8, "8 or more, for a deviation to mean much")
        self._hold("dtype", DTYPES.__contains__, " or ".join(DTYPES))
        self._hold("strategy", STRATEGIES.__contains__, " or ".join(STRATEGIES))
        self._hold("reshard", lambda v: isinstance(v, bool), "true, false or null")
        if self.warmup > self.steps:
            raise WeftError("--warmup", expected=f"at most --steps {self.steps}", got=self.warmup)
        self.micro(1)

    def _hold(self, name: str, holds: Any, expected: str) -> None:
        got = getattr(self, name)
        if got is None and name in OPTIONAL:
            return
        if got is None or got != got or not holds(got):
            raise WeftError(option(name), expected=expected, got=got)

    def micro(self, world: int) -> int:
        """Sequences that one of ``world`` processes takes at once.

        Raises :class:`WeftError` where the batch cannot be split so.
        """
        parts = self.accumulate * world
        if self.batch % parts:
            expected = f"a multiple of {parts} (--accumulate {self.accumulate} x {world} processes)"
            raise WeftError("--batch", expected=expected, got=self.batch)
        return self.batch // parts

    def to_json(self) -> dict[str, Any]:
        """Plain data, every field by its name."""
        return asdict(self)


COUNTS = (
    *("steps", "batch", "length", "accumulate", "validate_every", "validate_batches"),
    *("sample_every", "sample_tokens", "checkpoint_every", "keep", "patience"),
)
OPTIONAL = (
    *("clip", "checkpoint_seconds", "outlier_z", "reshard"),
    *("validate_every", "sample_every", "checkpoint_every"),
)
# What may differ between a run and its resumption: nothing of it changes what is computed.
LOOSE = frozenset(
    (
        *("checkpoint_every", "checkpoint_seconds", "keep", "sample_every", "sample_tokens"),
        *("validate_every", "validate_batches", "tensorboard", "picture", "patience", "graph"),
        # A step in other parts, or places: the same but for rounding.
        *("accumulate", "strategy", "reshard", "compile"),
    )
)
# The batch, rate and length that each size is trained with unless told: GPT-3's rates
# (arXiv:2005.14165, table 2.1) and half a million tokens a step; tiny is for minutes on two cores.
LARGE: dict[str, Any] = {
    "steps": 18_865, "length": 1024, "warmup": 700, "batch": 512,
    "validate_every": 250, "sample_every": 2000, "checkpoint_every": 1000, "validate_batches": 4,
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "steps": 800, "batch": 16, "length": 128, "lr": 3e-3, "warmup": 40,
        "validate_every": 100, "validate_batches": 4, "checkpoint_every": 100,
    },
    "124M": {**LARGE, "lr": 6e-4, "accumulate": 8},
    "350M": {**LARGE, "lr": 3e-4, "accumulate": 16},
    "774M": {**LARGE, "lr": 2.5e-4, "accumulate": 32},
    "1.5B": {**LARGE, "lr": 2e-4, "accumulate": 64},
}  # fmt: skip


def option(name: str) -> str:
    """A field's name on the command line."""
    return "--" + name.replace("_", "-")


def names() -> frozenset[str]:
    """Every field."""
    return frozenset(f.name for f in fields(TrainConfig))
