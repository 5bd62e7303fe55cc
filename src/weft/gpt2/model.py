"""GPT-2, composed of ``weft.ops``: tokens in, the mean loss or the logits out.

    x = wte[token] + wpe[place]
    L times:  x += attention(norm(x));  x += mlp(norm(x))
    logits = norm(x) wte^T

Shapes, in names: B sequences of T tokens, C the width, H heads of D = C / H, V tokens that there
are. U is one activation, B T C elements (96 MiB of bfloat16 at B = 64, T = 1024, C = 768).

What a step keeps for its backward, per block: both sums (2 U), both norms (2 U), q, k and v (3 U),
what attention gives (1 U, shared with the product after it) and a log-sum-exp for each query,
GELU's argument and answer (8 U). 16 U: 18 GiB in all for the 124M at B = 64. GELU's argument could
be computed again instead, 4.5 GiB less for a third more of that product's work: there is room.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from weft import ops
from weft.core import WeftError
from weft.gpt2.cache import Cache
from weft.gpt2.config import ModelConfig
from weft.gpt2.draws import Draws
from weft.ops.attention import attention_packed

Ways = dict[str, str | None]  # the implementation of each operator; None leaves it to dispatch
Where = dict[str, Any]  # device and dtype
Maybe = torch.Tensor | None
EPS = 1e-5
STD = 0.02


class Weights(torch.nn.Module):
    """A weight and a bias for each of its rows: a linear layer's, (out, in), or a norm's, (C,)."""

    def __init__(self, *shape: int, **where: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, **where))
        self.bias = torch.nn.Parameter(torch.empty(shape[0], **where))

    def product(self, x: torch.Tensor, way: str | None) -> torch.Tensor:
        """The linear layer, its bias added in the library's own epilogue."""
        return ops.linear(x, self.weight, self.bias, impl=way)


class Block(torch.nn.Module):
    """Attention and MLP. The stream comes with what is still to be added to it, and leaves so.

    One pass then adds, keeps the sum and normalises it (``add_layer_norm``). Traffic for each half,
    the products' own reading aside: forward 5 U (what is added written and read, the stream read,
    sum and norm written), backward 6 U (two gradients and the sum read, two written, one read for
    the bias). With the sum in the product's epilogue (``linear_residual``) it is 4 U and 8 U: its
    backward copies the gradient, and autograd adds the stream's two in a pass of its own.
    """

    def __init__(self, config: ModelConfig, layer: int, **where: Any) -> None:
        super().__init__()
        self.layer, self.heads, self.ways = layer, config.heads, config.ways()
        c = config.width
        self.ln_1 = Weights(c, **where)
        self.c_attn = Weights(3 * c, c, **where)
        self.attn_proj = Weights(c, c, **where)
        self.ln_2 = Weights(c, **where)
        self.c_fc = Weights(4 * c, c, **where)
        self.mlp_proj = Weights(c, 4 * c, **where)

    def forward(
        self, added_BTC: Maybe, x_BTC: torch.Tensor, draws: Draws | None, cache: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what is to be added, the stream), of the same before; nothing at the first block."""
        ways, place = self.ways[x_BTC.is_cuda], 3 * self.layer
        norm_BTC, x_BTC = add_norm(added_BTC, x_BTC, self.ln_1, ways, draws, place)
        heads_BTC = self.attend(norm_BTC, ways, draws, cache)
        added_BTC = self.attn_proj.product(heads_BTC, ways["linear"])
        norm_BTC, x_BTC = add_norm(added_BTC, x_BTC, self.ln_2, ways, draws, place + 2)
        # GELU while the product's tile is in registers: no pass of its own, which reads 4 U. Its
        # argument is kept where a backward will ask for it.
        keep, fc, way = torch.is_grad_enabled(), self.c_fc, ways["linear_gelu"]
        both = ops.linear_gelu(norm_BTC, fc.weight, fc.bias, keep=keep, impl=way)
        return self.mlp_proj.product(both[0] if keep else both, ways["linear"]), x_BTC

    def attend(
        self, norm_BTC: torch.Tensor, ways: Ways, draws: Draws | None, cache: Cache | None
    ) -> torch.Tensor:
        # q, k and v are views of one product, which reads its input once; attention takes them by
        # their strides, answers as the queries lie, and writes their gradients as that product's:
        # neither splitting nor joining moves anything.
        qkv_BTE, way = self.c_attn.product(norm_BTC, ways["linear"]), ways["attention"]
        given: dict[str, Any] = {"impl": None if draws and way == "torch" else way}
        if draws is not None:
            given |= {"dropout_p": draws.p, "seed": draws.at(3 * self.layer + 1)}
        if cache is None and given["impl"] != "torch":
            return attention_packed(qkv_BTE, self.heads, causal=True, **given)
        parts = qkv_BTE.split(norm_BTC.shape[-1], dim=-1)
        q_BHTD, k_BHTD, v_BHTD = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in parts)
        causal = True
        if cache is not None:
            causal = cache.length == 0  # else one token, which sees all that are kept
            k_BHTD, v_BHTD = cache.extend(self.layer, k_BHTD, v_BHTD)
        if given["impl"] == "torch":  # whose own choice of a kernel a trace can follow
            y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=causal)
        else:
            y_BHTD = ops.attention(q_BHTD, k_BHTD, v_BHTD, causal=causal, **given)
        return y_BHTD.transpose(1, 2).flatten(2)


def add_norm(
    added_BTC: Maybe,
    x_BTC: torch.Tensor,
    norm: Weights,
    ways: Ways,
    draws: Draws | None,
    place: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the sum, the sum); with dropout of what is added, if there is any, in that pass."""
    weight, bias = norm.weight, norm.bias
    if added_BTC is None:
        return ops.layer_norm(x_BTC, weight, bias, eps=EPS, impl=ways["layer_norm"]), x_BTC
    if draws is None:
        impl = ways["add_layer_norm"]
        return ops.add_layer_norm(added_BTC, x_BTC, weight, bias, eps=EPS, impl=impl)
    p, seed, impl = draws.p, draws.at(place), ways["dropout_add_layer_norm"]
    return ops.dropout_add_layer_norm(
        added_BTC, x_BTC, weight, bias, p=p, seed=seed, eps=EPS, impl=impl
    )


class GPT(torch.nn.Module):
    """GPT-2 of these sizes; the token table is the head's too.

    Args:
        config: sizes, and the implementations of the operators.
        seed: of the first weights: the same on every device, in every dtype.
        device, dtype: of the parameters; on ``meta`` none is filled.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.ways = config, config.ways()
        c, where = config.width, Where(device=device, dtype=dtype)
        self.wte = torch.nn.Parameter(torch.empty(config.padded_vocab, c, **where))
        self.wpe = torch.nn.Parameter(torch.empty(config.block_size, c, **where))
        self.h = torch.nn.ModuleList(Block(config, i, **where) for i in range(config.layers))
        self.ln_f = Weights(c, **where)
        if not self.wte.is_meta:
            self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """GPT-2's start: normal, of 0.02; what adds to the stream less by sqrt(2 layers), so that
        its size does not grow with them. Biases and the padded rows are 0, norms 1."""
        generator = torch.Generator().manual_seed(seed)
        less = STD / math.sqrt(2 * self.config.layers)
        for name, p in self.named_parameters():
            if p.dim() == 1:
                p.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                std = less if "_proj." in name else STD
                p.copy_(torch.empty(p.shape).normal_(0.0, std, generator=generator))
        self.wte[self.config.vocab_size :].zero_()

    def forward(
        self,
        tokens: torch.Tensor,
        targets: Maybe = None,
        cache: Cache | None = None,
        seed: int | None = None,
    ) -> torch.Tensor:
        """The loss where there are targets, else logits.

        Args:
            tokens: (B, T) int64, 1 to ``block_size`` of them.
            targets: (B, T) int64: the token to come at each place; -100 counts for nothing.
            cache: of the tokens before these; these are added to it.
            seed: of dropout, 0 to 2^63 - 1; another one for each step and each process.

        Returns:
            The mean loss in nats a token, a float32 scalar, with no logits in memory but in
            ``torch`` and ``eager``. Without targets logits in the parameters' dtype, (B, T, V), or
            with a cache those of the last token alone, (B, 1, V).

        Raises:
            WeftError: no token, more than there are places, a shape that does not fit; training
                with dropout and no ``seed``.
        """
        first = 0 if cache is None else cache.length
        self._check(tokens, targets, first)
        if cache is not None:
            cache.admit(tokens.shape[1])
        draws, ways = self._draws(seed), self.ways[tokens.is_cuda]
        # Both tables in one pass; its backward sums each row in a fixed order, with no atomics.
        wpe = self.wpe[first:] if first else self.wpe
        x_BTC = ops.embedding(tokens, self.wte, wpe, impl=ways["embedding"])
        if draws is not None:
            x_BTC = ops.dropout(x_BTC, p=draws.p, seed=draws.at(0), impl=ways["dropout"])
        added_BTC = None
        for block in self.h:
            added_BTC, x_BTC = block(added_BTC, x_BTC, draws, cache)
        place = 3 * self.config.layers
        norm_BTC, _ = add_norm(added_BTC, x_BTC, self.ln_f, ways, draws, place)
        if cache is not None:
            cache.advance(tokens.shape[1])
            norm_BTC = norm_BTC[:, -1:]
        if targets is None:
            return F.linear(norm_BTC, self._head())
        return self._loss(norm_BTC.flatten(0, 1), targets.flatten(), ways["linear_cross_entropy"])

    def _head(self) -> torch.Tensor:
        """The table without its padding: rows that are no tokens have no share of the loss."""
        tokens = self.config.vocab_size
        return self.wte if tokens == len(self.wte) else self.wte[:tokens]

    def _loss(self, x_NC: torch.Tensor, targets_N: torch.Tensor, way: str | None) -> torch.Tensor:
        if way == "torch":  # a product over all rows, which is faster; the padding cut off after
            logits_NV = F.linear(x_NC, self.wte)[:, : self.config.vocab_size]
            return F.cross_entropy(logits_NV.float(), targets_N)
        return ops.linear_cross_entropy(x_NC, self._head(), targets_N, impl=way)

    def _draws(self, seed: int | None) -> Draws | None:
        if not (self.training and self.config.dropout):
            return None
        if seed is None:
            hint = "a function of the run's seed and the step, so that a step can be repeated"
            raise WeftError("GPT: dropout", expected="seed=", got="none", hint=hint)
        return Draws(self.config.dropout, seed)

    def _check(self, tokens: torch.Tensor, targets: Maybe, first: int) -> None:
        most = self.config.block_size - first
        if tokens.dim() != 2 or not 1 <= tokens.shape[1] <= most:
            expected = f"(B, T) with T of 1 to {most}"
            raise WeftError("GPT: tokens", expected=expected, got=tuple(tokens.shape))
        if targets is not None and targets.shape != tokens.shape:
            wanted, got = (tuple(x.shape) for x in (tokens, targets))
            raise WeftError("GPT: targets", expected=wanted, got=got)
