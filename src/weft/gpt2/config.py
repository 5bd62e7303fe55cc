"""``ModelConfig``: the sizes of a GPT-2, checked where they are made; those that are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.core import WeftError, registry
from weft.core.operator import unknown_name

SWITCHES = ("weft", "torch", "eager")
# The operators that a model runs; ``ops`` may name an implementation for each.
USED = (
    "embedding",
    "layer_norm",
    "add_layer_norm",
    "linear",
    "linear_gelu",
    "attention",
    "linear_cross_entropy",
    "dropout",
    "dropout_add_layer_norm",
)
# What ``weft`` names on a GPU, where leaving it to dispatch gives something else that counts:
ON_A_GPU = {
    # as fast as cuDNN's at GPT-2's heads (both directions 659 and 664 us for 32 x 12 x 1024 x 64 on
    # an H200), and its backward gives the same bits each time, which cuDNN's does not;
    "attention": "triton",
    # dispatch knows no measured size of it; layer norm's own kernels take half of torch's time;
    "add_layer_norm": "triton",
    # cuBLAS with its bias epilogue either way; the bias' gradient is a pass at the copy's speed;
    "linear": "cuda",
    # GELU while the product's tile is in registers, and its slope with the bias' gradient;
    "linear_gelu": "triton",
    # torch's own keeps all logits: 6.6 GB of them at 64 x 1024 tokens, in bfloat16 alone.
    "linear_cross_entropy": "cuda",
}
PADDED = 128  # rows of the token table: whole tiles of a product, as llm.c and nanoGPT pad it


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The sizes of a GPT-2 and how it is computed; the defaults are those of the 124M.

    Args:
        vocab_size: the tokens that there are; the table is padded to ``padded_vocab`` rows.
        block_size: the most tokens of a sequence: positions are learned, one row each.
        layers: blocks of attention and MLP.
        heads: attention heads; ``width / heads`` is a multiple of 8, at most 256.
        width: of the residual stream; the MLP is four times as wide.
        dropout: the share that training leaves out, after the embedding, of the attention's
            weights, and of what each half of a block adds.
        ops: ``weft`` (each operator by the library's fastest: the table of measured figures, and
            ``ON_A_GPU``; on a CPU torch's own), ``torch`` (torch's own calls alone) or ``eager``
            (composed by hand); or a mapping from operators to implementations, as ``weft ops``
            lists them, the others as with ``weft``.

    Raises:
        WeftError: a size under 1, heads that do not divide the width or are of no size that
            attention takes, a share outside [0, 1), or an operator or implementation unknown.
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
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise WeftError(
                    f"ModelConfig: {name}", expected="an integer of 1 or more", got=value
                )
        size, rest = divmod(self.width, self.heads)
        if rest or size % 8 or size > 256:
            expected = (
                f"a part of the width {self.width} that is a multiple of 8, at most 256, each"
            )
            raise WeftError("ModelConfig: heads", expected=expected, got=self.heads)
        if not 0.0 <= self.dropout < 1.0:
            raise WeftError("ModelConfig: dropout", expected="0 to below 1", got=self.dropout)
        _check_ops(self.ops)

    @property
    def padded_vocab(self) -> int:
        """Rows of the token table: ``vocab_size`` up to the next multiple of 128."""
        return -(-self.vocab_size // PADDED) * PADDED

    @property
    def parameters(self) -> int:
        """Trained numbers, those of the padded rows included."""
        c = self.width
        each = 12 * c * c + 13 * c  # products of 3, 1, 4 and 4 times c x c, their biases, two norms
        return (self.padded_vocab + self.block_size) * c + self.layers * each + 2 * c

    def flops_a_token(self, length: int) -> int:
        """Operations that training on a token of a sequence of ``length`` takes, by llm.c's
        convention: 6 N + 6 L C T, with N the ``parameters``. 803.5 million for the 124M at 1024."""
        return 6 * (self.parameters + self.layers * self.width * length)

    def ways(self) -> dict[bool, dict[str, str | None]]:
        """The implementation of each operator in ``USED``, elsewhere (False) and on a GPU (True);
        None leaves it to dispatch."""
        if isinstance(self.ops, str) and self.ops != "weft":
            whole: dict[str, str | None] = {name: self._whole(name) for name in USED}
            return {False: whole, True: whole}
        named = {} if isinstance(self.ops, str) else self.ops
        return {
            False: {name: named.get(name) for name in USED},
            True: {name: named.get(name, ON_A_GPU.get(name)) for name in USED},
        }

    def _whole(self, operator: str) -> str:
        """The switch itself; ``eager`` where torch's own dropout would have other bits."""
        assert isinstance(self.ops, str)
        return self.ops if self.ops in registry.implementation_names(operator) else "eager"


def _check_ops(ops: str | Mapping[str, str]) -> None:
    if isinstance(ops, str):
        if ops not in SWITCHES:
            expected = f"{', '.join(SWITCHES)}, or a mapping from operators to implementations"
            raise WeftError("ModelConfig: ops", expected=expected, got=repr(ops))
        return
    for operator, impl in ops.items():
        if operator not in USED:
            raise unknown_name("operator of a GPT-2", operator, list(USED))
        known = registry.implementation_names(operator)
        if impl not in known:
            raise unknown_name(f"implementation of {operator}", impl, known)


PRESETS = {
    # Bytes, and small enough for a CPU.
    "tiny": ModelConfig(vocab_size=256, block_size=256, layers=4, heads=4, width=128),
    "124M": ModelConfig(),
    "350M": ModelConfig(layers=24, heads=16, width=1024),
    "774M": ModelConfig(layers=36, heads=20, width=1280),
    "1.5B": ModelConfig(layers=48, heads=25, width=1600),
}
ALIASES = {"gpt2": "124M", "gpt2-medium": "350M", "gpt2-large": "774M", "gpt2-xl": "1.5B"}


def preset(name: str) -> ModelConfig:
    """The sizes of this name, ours or Hugging Face's; :class:`WeftError` if there is none."""
    found = PRESETS.get(ALIASES.get(name, name))
    if found is None:
        raise unknown_name("preset", name, [*PRESETS, *ALIASES])
    return found
