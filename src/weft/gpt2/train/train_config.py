"""``TrainConfig``: how a run is trained; the recipe of each preset and the learning rate's schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from weft.core import WeftError

DTYPES, STRATEGIES, SPARSE = ("float32", "bfloat16"), ("ddp", "fsdp"), ("mlp",)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a run. None switches a feature off, unless its description says otherwise.

    Attributes:
        steps: updates of the weights.
        batch: sequences per step, over all processes and micro-batches.
        length: tokens of a sequence.
        accumulate: micro-batches that each process splits its part of a batch into.
        lr, warmup, lr_floor: highest learning rate, steps until it is reached, and the final learning
            rate as a fraction of it (:func:`cosine_schedule`).
        weight_decay, beta1, beta2, eps: AdamW's.
        clip: largest norm of all gradients together; None clips nothing.
        seed: seed of the weights, the order of the text, dropout and the samples.
        dtype: of weights and activations: float32, or bfloat16 with float32 master weights.
        compile: compile the model with ``torch.compile``.
        graph: launch a micro-batch's kernels as one CUDA graph where possible: on one GPU, without
            dropout and ``compile``.
        sparse: mlp: the weights of the MLPs are 2:4 sparse in rows and columns (``sparse_mlp``).
        sparse_refresh: steps between choices of the sparse weights' places; pruned elements then have
            gradients, and can come back. None: the places of the start stay.
        strategy: how several processes share the work, ddp or fsdp.
        reshard: whether fsdp gathers weights before each forward and backward and drops them after,
            which saves 2 bytes per parameter in bfloat16; None: above a billion parameters.
        validate_every, validate_batches: steps between validations, and batches of a validation.
        sample_every, sample_tokens: steps between samples, and tokens of a sample.
        checkpoint_every, checkpoint_seconds: steps and seconds between checkpoints; the last step
            always writes one.
        keep: number of checkpoints that are not deleted, the newest.
        outlier_z, outlier_window: a step is skipped if its loss or gradient norm is more than
            ``outlier_z`` standard deviations above the mean of the last ``outlier_window`` steps.
        patience: this many skipped steps in a row end the run.
        tensorboard, picture: whether to write TensorBoard's log, and to plot the losses at the end, if
            the packages for them are installed.

    Raises:
        WeftError: a value out of range.
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
    sparse: str | None = None
    sparse_refresh: int | None = None
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
            self._require(name, lambda v: _is_whole(v) and 1 <= v <= MOST, f"a whole number from 1 to {MOST}")
        for name in ("clip", "checkpoint_seconds", "outlier_z"):
            self._require(name, lambda v: v > 0, "above 0")
        for name in ("lr", "eps"):
            self._require(name, lambda v: 0 < v < math.inf, "a finite number above 0")
        for name in ("warmup", "weight_decay", "seed"):
            self._require(name, lambda v: 0 <= v < math.inf, "0 or more")
        for name in ("warmup", "seed"):
            self._require(name, lambda v: _is_whole(v) and v <= MOST_SEED, "a whole number below 2^62")
        for name in ("compile", "graph", "tensorboard", "picture"):
            self._require(name, lambda v: isinstance(v, bool), "true or false")
        for name in ("beta1", "beta2"):
            self._require(name, lambda v: 0 <= v < 1, "from 0 to below 1")
        self._require("lr_floor", lambda v: 0 <= v <= 1, "from 0 to 1")
        self._require("outlier_window", lambda v: v >= 8, "8 or more, for a deviation to mean much")
        self._require("dtype", DTYPES.__contains__, " or ".join(DTYPES))
        self._require("strategy", STRATEGIES.__contains__, " or ".join(STRATEGIES))
        self._require("reshard", lambda v: isinstance(v, bool), "true, false or null")
        self._require("sparse", SPARSE.__contains__, " or ".join(SPARSE))
        if self.sparse_refresh is not None and self.sparse is None:
            raise WeftError("--sparse-refresh", expected="--sparse mlp with it", got="a dense run")
        if self.sparse is not None and self.compile:
            # The products of a sparse weight are an autograd.Function of ours, not traced.
            raise WeftError("--sparse", expected="no --compile", got="--compile", hint="--no-compile")
        if self.warmup > self.steps:
            raise WeftError("--warmup", expected=f"at most --steps {self.steps}", got=self.warmup)
        self.micro_batch_size(1)

    def _require(self, name: str, is_valid: Callable[[Any], bool], expected: str) -> None:
        value = getattr(self, name)
        if value is None and name in OPTIONAL:
            return
        try:
            # Comparisons with NaN are false, so a range check alone would not catch it in every direction.
            good = value is not None and value == value and is_valid(value)
        except TypeError:  # text or a list, from --set or from a file
            good = False
        if not good:
            raise WeftError(option_name(name), expected=expected, got=f"{value!r:.80}")

    def micro_batch_size(self, world: int) -> int:
        """Return the sequences of a micro-batch of one of ``world`` processes.

        Raises :class:`WeftError` if the batch cannot be split so.
        """
        micro_batches = self.accumulate * world
        if self.batch % micro_batches:
            split = f"(--accumulate {self.accumulate} x {world} processes)"
            raise WeftError("--batch", expected=f"a multiple of {micro_batches} {split}", got=self.batch)
        return self.batch // micro_batches

    def to_json(self) -> dict[str, Any]:
        """Return plain data, every field by its name."""
        return asdict(self)


MOST, MOST_SEED = 1 << 40, (1 << 62) - 1


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


COUNTS = (
    *("steps", "batch", "length", "accumulate", "validate_every", "validate_batches"),
    *("sample_every", "sample_tokens", "checkpoint_every", "keep", "patience", "sparse_refresh"),
)
OPTIONAL = (
    *("clip", "checkpoint_seconds", "outlier_z", "reshard"),
    *("validate_every", "sample_every", "checkpoint_every", "sparse", "sparse_refresh"),
)
# Fields that may change when a run is resumed, because they do not change what is computed.
MAY_CHANGE_ON_RESUME = frozenset(
    (
        *("checkpoint_every", "checkpoint_seconds", "keep", "sample_every", "sample_tokens"),
        *("validate_every", "validate_batches", "tensorboard", "picture", "patience", "graph"),
        # These split or place a step differently: the same numbers except for rounding.
        *("accumulate", "strategy", "reshard", "compile"),
    )
)
# Batch, learning rate and length of each preset: GPT-3's learning rates (arXiv:2005.14165, table 2.1)
# and half a million tokens per step; tiny is sized for minutes on two cores.
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


def option_name(field: str) -> str:
    """Return a field's name on the command line."""
    return "--" + field.replace("_", "-")


def field_names() -> frozenset[str]:
    """Return the names of all fields."""
    return frozenset(f.name for f in fields(TrainConfig))


def cosine_schedule(step: int, *, steps: int, lr: float, warmup: int, floor: float) -> float:
    """Return the learning rate of the step after ``step`` completed ones.

    It rises linearly to ``lr`` over ``warmup`` steps, none of which has a rate of 0, and falls as a
    cosine to ``floor`` times ``lr`` at the last step (arXiv:1608.03983, without restarts).

    >>> [round(cosine_schedule(s, steps=6, lr=1.0, warmup=2, floor=0.1), 3) for s in range(6)]
    [0.5, 1.0, 1.0, 0.775, 0.325, 0.1]
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    # max: a run may have no step after its warm-up.
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
