"""``ModelConfig``: the sizes of a GPT-2 and the implementations of its operators; published presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.core import WeftError, registry
from weft.core.operator import unknown_name

OPS_CHOICES = ("weft", "torch", "eager")
# The operators that a model calls; ``ops`` may name an implementation for each.
OPERATORS = (
    "embedding",
    "layer_norm",
    "add_layer_norm",
    "linear",
    "linear_gelu",
    "mlp_gelu",
    "attention",
    "attention_decode",
    "linear_cross_entropy",
    "dropout",
    "dropout_add_layer_norm",
)
# Implementations that ``ops="weft"`` names on a GPU because dispatch would choose a worse one:
GPU_IMPLEMENTATIONS = {
    # As fast as cuDNN's at GPT-2's heads (forward and backward 659 and 664 us for
    # 32 x 12 x 1024 x 64 on an H200), and its backward is deterministic, which cuDNN's is not.
    "attention": "triton",
    # torch's copies the cache in each step, to keep what lies past a length from the result.
    "attention_decode": "triton",
    # Dispatch has no measured size of it; layer norm's own kernels take half of torch's time.
    "add_layer_norm": "triton",
    # cuBLAS with its bias epilogue in both; here the bias gradient runs at copy bandwidth.
    "linear": "cuda",
    # GELU is applied while the product's tile is in registers, its slope with the bias gradient.
    "linear_gelu": "triton",
    # torch's stores all logits: 6.6 GB of them at 64 x 1024 tokens, in bfloat16 alone.
    "linear_cross_entropy": "cuda",
}
# The token table's rows are padded to whole tiles of a product, as in llm.c and nanoGPT.
VOCAB_MULTIPLE = 128
# Beyond these sizes no machine builds the model: a thousand times GPT-3's width, ten times its blocks.
MOST = {"vocab_size": 1 << 24, "block_size": 1 << 24, "layers": 1024, "heads": 1 << 14, "width": 1 << 20}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a GPT-2 and how it is computed; the defaults are those of the 124M.

    Args:
        vocab_size: number of tokens; the token table is padded to ``padded_vocab`` rows.
        block_size: longest sequence in tokens; each position has a learned embedding.
        layers: number of blocks (attention and MLP).
        heads: attention heads; ``width / heads`` is a multiple of 8, at most 256.
        width: embedding dimension (residual stream); the MLP is four times as wide.
        dropout: probability of dropout in training: after the embedding, on the attention weights
            and on the output of each half of a block.
        ops: ``weft`` (the fastest of the library: dispatch by measurement, and
            ``GPU_IMPLEMENTATIONS``; on a CPU torch's own), ``torch`` (torch's operators only) or
            ``eager`` (plain PyTorch calls); or a mapping from operators to implementations, as
            ``weft ops`` lists them; operators that it leaves out are as with ``weft``.

    Raises:
        WeftError: a size below 1, heads that do not divide the width or have a size that attention
            does not support, dropout outside [0, 1), an unknown operator or implementation.
    """

    vocab_size: int = 50257
    block_size: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    dropout: float = 0.0
    ops: str | Mapping[str, str] = "weft"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "layers", "heads", "width"):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or not 1 <= value <= MOST[name]:
                too_large = is_whole and value > 1
                expected = f"an integer of {f'at most {MOST[name]}' if too_large else '1 or more'}"
                raise WeftError(f"ModelConfig: {name}", expected=expected, got=f"{value!r:.80}")
        head_dim, remainder = divmod(self.width, self.heads)
        if remainder or head_dim % 8 or head_dim > 256:
            expected = f"a divisor of the width {self.width}, with heads of a multiple of 8 up to 256"
            raise WeftError("ModelConfig: heads", expected=expected, got=self.heads)
        dropout = self.dropout
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
            raise WeftError("ModelConfig: dropout", expected="0 to below 1", got=f"{dropout!r:.80}")
        _check_ops(self.ops)

    @property
    def padded_vocab(self) -> int:
        """Rows of the token table: ``vocab_size`` rounded up to a multiple of 128."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def parameters(self) -> int:
        """Number of trained parameters, including the padding rows of the token table."""
        c = self.width
        # Four products of 3, 1, 4 and 4 times C x C with their biases, and two norms.
        per_block = 12 * c * c + 13 * c
        return (self.padded_vocab + self.block_size) * c + self.layers * per_block + 2 * c

    def flops_per_token(self, length: int) -> int:
        """Training FLOPs per token of a sequence of ``length``, by llm.c's convention:
        6 N + 6 L C T, with N the ``parameters``. 803.5 million for the 124M at 1024."""
        return 6 * (self.parameters + self.layers * self.width * length)

    def implementations(self) -> dict[bool, dict[str, str | None]]:
        """Return the implementation of each operator, by ``tensor.is_cuda``; None leaves the choice
        to dispatch, and of ``mlp_gelu`` means ``linear_gelu`` and ``linear`` in its place.

        No default names ``mlp_gelu``: steps of the 124M with it take 0.3 % longer on an H200 than with the
        two operators (results: train-124M-2026-11-26.txt)."""
        if isinstance(self.ops, str) and self.ops != "weft":
            # torch.nn.functional's dropout has other random bits than ours: "torch" takes eager's.
            named = {
                name: self.ops if self.ops in registry.implementation_names(name) else "eager"
                for name in OPERATORS
            }
            by_operator: dict[str, str | None] = {**named, "mlp_gelu": None}
            return {False: by_operator, True: by_operator}
        overrides = {} if isinstance(self.ops, str) else self.ops
        return {
            False: {name: overrides.get(name) for name in OPERATORS},
            True: {name: overrides.get(name, GPU_IMPLEMENTATIONS.get(name)) for name in OPERATORS},
        }

    def invariant_implementations(self) -> dict[str, str | None]:
        """Return the implementation of each operator inside ``weft.batch_invariant()``: those that ``ops``
        names; None leaves the choice to dispatch.

        Raises:
            WeftError: ``ops`` names a set of operators whose rows may depend on the batch.
        """
        if isinstance(self.ops, str) and self.ops != "weft":
            expected = 'ops="weft", or a mapping from operators to implementations'
            raise WeftError("ModelConfig: ops with batch invariance", expected=expected, got=repr(self.ops))
        overrides = {} if isinstance(self.ops, str) else self.ops
        return {name: overrides.get(name) for name in OPERATORS}


def _check_ops(ops: str | Mapping[str, str]) -> None:
    if not isinstance(ops, Mapping):
        if ops not in OPS_CHOICES:
            expected = f"{', '.join(OPS_CHOICES)}, or a mapping from operators to implementations"
            raise WeftError("ModelConfig: ops", expected=expected, got=repr(ops))
        return
    for operator, impl in ops.items():
        if operator not in OPERATORS:
            raise unknown_name("operator of a GPT-2", operator, list(OPERATORS))
        known = registry.implementation_names(operator)
        if impl not in known:
            raise unknown_name(f"implementation of {operator}", impl, known)


PRESETS = {
    # Bytes as tokens, and small enough for a CPU.
    "tiny": ModelConfig(vocab_size=256, block_size=256, layers=4, heads=4, width=128),
    "124M": ModelConfig(),
    "350M": ModelConfig(layers=24, heads=16, width=1024),
    "774M": ModelConfig(layers=36, heads=20, width=1280),
    "1.5B": ModelConfig(layers=48, heads=25, width=1600),
}
ALIASES = {"gpt2": "124M", "gpt2-medium": "350M", "gpt2-large": "774M", "gpt2-xl": "1.5B"}


def preset(name: str) -> ModelConfig:
    """Return the preset of this name, Weft's or Hugging Face's; :class:`WeftError` if there is none."""
    config = PRESETS.get(ALIASES.get(name, name))
    if config is None:
        raise unknown_name("preset", name, [*PRESETS, *ALIASES])
    return config
