"""GPT-2, composed of ``weft.ops``: tokens in, the mean loss or the logits out.

    x = wte[token] + wpe[position]
    L times:  x += attention(norm(x));  x += mlp(norm(x))
    logits = norm(x) wte^T

Letters in names give shapes: B sequences, T tokens of each, C the width, H heads of D = C / H,
E = 3 C (queries, keys and values), F = 4 C (the MLP), V tokens of the vocabulary, N = B T rows.

Memory: one activation U has B T C elements (96 MiB of bfloat16 at B = 64, T = 1024, C = 768). A block
stores 16 U for its backward: both sums (2), both norms (2), q, k and v (3), the output of attention
(1), and input and output of GELU (8). That is 18 GiB for the 124M at B = 64. Recomputing GELU's input
would save 4.5 GiB for a third more work in that product; an H200 has enough memory without it.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft import ops
from weft.core import WeftError
from weft.dispatch import invariance
from weft.gpt2.model.config import ModelConfig
from weft.gpt2.model.kv_cache import KVCache
from weft.nn.sparse import masked_linear
from weft.ops.attention import attention_packed

Implementations = dict[str, str | None]  # by operator; None leaves the choice to dispatch
EPS = 1e-5
INIT_STD = 0.02


class DropoutSeeds:
    """Dropout of one forward pass: its probability, and a seed for each place where it is applied.

    A seed depends on nothing but the pass's seed and the dropout site. The backward computes the
    same mask again, so no mask is stored.
    """

    def __init__(self, p: float, seed: int) -> None:
        self.p = p
        self.seed = seed

    def at(self, site: int) -> int:
        """Seed of a dropout site. Site 0 follows the embedding; block i has 3 i + 1, + 2 and + 3."""
        # The golden ratio's bits, as in SplitMix64: neighbouring sites get unrelated seeds.
        return (self.seed + site * 0x9E3779B97F4A7C15) % 2**63


class WeightAndBias(torch.nn.Module):
    """Parameters of a linear layer, weight (out, in), or of a norm, weight (C,); bias of its rows."""

    def __init__(self, *shape: int, **factory_kwargs: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, **factory_kwargs))
        self.bias = torch.nn.Parameter(torch.empty(shape[0], **factory_kwargs))
        # Set by ``train.sparse_mlp``: the elements of a 2:4 weight, and whether the others have a gradient.
        self.mask: Tensor | None = None
        self.dense_gradient = False

    def linear(self, x: Tensor, impl: str | None) -> Tensor:
        """``x @ weight.T + bias``."""
        return ops.linear(x, self.weight, self.bias, impl=impl)

    def sparse_linear(self, x: Tensor) -> Tensor:
        """``x @ (weight * mask).T + bias`` by 2:4 sparse products, forward and for the gradient of x."""
        assert self.mask is not None
        return masked_linear(x, self.weight, self.bias, self.mask, dense_gradient=self.dense_gradient)


class Block(torch.nn.Module):
    """Attention and MLP, each after a norm.

    The residual stream ``x_BTC`` comes with ``delta_BTC``, the previous branch's output, which is not
    yet added to it, and leaves in the same form. So one kernel adds, stores the sum and normalises it
    (``add_layer_norm``). Memory traffic of each half besides the products' own reads: forward 5 U
    (delta written and read, stream read, sum and norm written), backward 5 U (two gradients and the
    sum read, one written for both terms, which is read for the bias). With the sum in the product's epilogue
    (``linear_residual``) it would be 4 U and 8 U: that backward copies the gradient, and autograd adds
    the stream's two gradients in a pass of its own.
    """

    def __init__(self, config: ModelConfig, layer: int, **factory_kwargs: Any) -> None:
        super().__init__()
        self.layer, self.heads, self.config = layer, config.heads, config
        self.impls = config.implementations()
        c = config.width
        self.ln_1 = WeightAndBias(c, **factory_kwargs)
        self.c_attn = WeightAndBias(3 * c, c, **factory_kwargs)
        self.attn_proj = WeightAndBias(c, c, **factory_kwargs)
        self.ln_2 = WeightAndBias(c, **factory_kwargs)
        self.c_fc = WeightAndBias(4 * c, c, **factory_kwargs)
        self.mlp_proj = WeightAndBias(c, 4 * c, **factory_kwargs)

    def forward(
        self, delta_BTC: Tensor | None, x_BTC: Tensor, seeds: DropoutSeeds | None, cache: KVCache | None
    ) -> tuple[Tensor, Tensor]:
        """Return (delta, stream) after this block; ``delta_BTC`` is None in the first block."""
        impls, site = implementations_of(self, x_BTC), 3 * self.layer
        norm_BTC, x_BTC = add_norm(delta_BTC, x_BTC, self.ln_1, impls, seeds, site)
        attended_BTC = self.attention(norm_BTC, impls, seeds, cache)
        delta_BTC = self.attn_proj.linear(attended_BTC, impls["linear"])
        norm_BTC, x_BTC = add_norm(delta_BTC, x_BTC, self.ln_2, impls, seeds, site + 2)
        return self.mlp(norm_BTC, impls), x_BTC

    def mlp(self, norm_BTC: Tensor, impls: Implementations) -> Tensor:
        """Return the projection of GELU of the first layer."""
        fc, proj, impl = self.c_fc, self.mlp_proj, impls["mlp_gelu"]
        if fc.mask is not None:
            # GELU is a pass of its own here: no sparse product has it in its epilogue.
            return proj.sparse_linear(ops.gelu(fc.sparse_linear(norm_BTC)))
        # As one operator, GELU's slope runs in the epilogue of a product of the backward.
        if impl is not None:
            return ops.mlp_gelu(norm_BTC, fc.weight, fc.bias, proj.weight, proj.bias, impl=impl)
        # GELU runs in the product's epilogue: a pass of its own would read and write 4 U.
        gelu_BTF = ops.linear_gelu(norm_BTC, fc.weight, fc.bias, impl=impls["linear_gelu"])
        return proj.linear(gelu_BTF, impls["linear"])

    def attention(
        self, norm_BTC: Tensor, impls: Implementations, seeds: DropoutSeeds | None, cache: KVCache | None
    ) -> Tensor:
        """Causal attention of each sequence to itself and to the cached tokens before it."""
        # One product computes q, k and v and reads its input once. Attention takes them by their
        # strides, returns the layout of the queries, and writes the three gradients next to each
        # other as that product's: splitting and joining move no data.
        qkv_BTE, impl = self.c_attn.linear(norm_BTC, impls["linear"]), impls["attention"]
        # torch's own attention has no seed for its dropout.
        options: dict[str, Any] = {"impl": None if seeds and impl == "torch" else impl}
        if seeds is not None:
            options |= {"dropout_p": seeds.p, "seed": seeds.at(3 * self.layer + 1)}
        if cache is None and options["impl"] != "torch":
            return attention_packed(qkv_BTE, self.heads, causal=True, **options)
        qkv = qkv_BTE.split(norm_BTC.shape[-1], dim=-1)
        q_BHTD, k_BHTD, v_BHTD = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in qkv)
        causal: bool | str = True
        if cache is not None:
            is_step = cache.length > 0 and q_BHTD.shape[2] == 1
            if cache.length:  # one query sees all cached tokens
                causal = False if is_step else "bottom_right"
            k_BHTD, v_BHTD = cache.append(self.layer, k_BHTD, v_BHTD)
            # The whole buffers have the same shapes in every step; the lengths are on the device.
            buffers, lengths = (cache.keys[self.layer], cache.values[self.layer]), cache.lengths
            if invariance.is_requested():
                # The kernel of whole sequences, whose bits do not depend on the number of queries and keys.
                y_BHTD = ops.attention(
                    q_BHTD, *buffers, causal="bottom_right", key_lengths=lengths, **options
                )
                return y_BHTD.transpose(1, 2).flatten(2)
            if is_step and not (torch.is_grad_enabled() or options["impl"] == "torch"):
                q_BTHD, impl = q_BHTD.transpose(1, 2), impls["attention_decode"]
                return ops.attention_decode(q_BTHD, *buffers, lengths, impl=impl).flatten(2)
        if options["impl"] == "torch":  # torch.compile can trace torch's own choice of a kernel
            seen = _bottom_right_mask(q_BHTD, k_BHTD) if causal == "bottom_right" else None
            is_causal = causal is True
            y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, seen, is_causal=is_causal)
        else:
            y_BHTD = ops.attention(q_BHTD, k_BHTD, v_BHTD, causal=causal, **options)
        return y_BHTD.transpose(1, 2).flatten(2)


def _bottom_right_mask(q_BHTD: Tensor, k_BHTD: Tensor) -> Tensor:
    """Return (Tq, Tk), True where a query sees a key: the last query sees all."""
    tq, tk = q_BHTD.shape[2], k_BHTD.shape[2]
    return torch.ones(tq, tk, dtype=torch.bool, device=q_BHTD.device).tril(tk - tq)


def implementations_of(module: Block | GPT, x: Tensor) -> Implementations:
    """Return the implementation of each operator for a call on ``x``."""
    if invariance.is_requested():
        return module.config.invariant_implementations()
    return module.impls[x.is_cuda]


def add_norm(
    delta_BTC: Tensor | None,
    x_BTC: Tensor,
    norm: WeightAndBias,
    impls: Implementations,
    seeds: DropoutSeeds | None,
    site: int,
) -> tuple[Tensor, Tensor]:
    """Return (layer norm of the sum, the sum ``dropout(delta) + x``), computed in one pass."""
    weight, bias = norm.weight, norm.bias
    if delta_BTC is None:
        return ops.layer_norm(x_BTC, weight, bias, eps=EPS, impl=impls["layer_norm"]), x_BTC
    if seeds is None:
        impl = impls["add_layer_norm"]
        return ops.add_layer_norm(delta_BTC, x_BTC, weight, bias, eps=EPS, impl=impl)
    p, seed, impl = seeds.p, seeds.at(site), impls["dropout_add_layer_norm"]
    return ops.dropout_add_layer_norm(delta_BTC, x_BTC, weight, bias, p=p, seed=seed, eps=EPS, impl=impl)


class GPT(torch.nn.Module):
    """GPT-2; the token table is also the weight of the head.

    Args:
        config: sizes, and the implementations of the operators.
        seed: seed of the initial weights, which are the same on every device and in every dtype.
        device, dtype: device and dtype of the parameters; on ``meta`` they are not initialised.
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
        self.config, self.impls = config, config.implementations()
        c = config.width
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.wte = torch.nn.Parameter(torch.empty(config.padded_vocab, c, **factory_kwargs))
        # Positions are learned, one row for each.
        self.wpe = torch.nn.Parameter(torch.empty(config.block_size, c, **factory_kwargs))
        self.h = torch.nn.ModuleList(Block(config, i, **factory_kwargs) for i in range(config.layers))
        self.ln_f = WeightAndBias(c, **factory_kwargs)
        if not self.wte.is_meta:
            self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Initialise as GPT-2: weights normal with a standard deviation of 0.02, biases 0, norms 1.

        The two projections that add to the stream are smaller by sqrt(2 layers), so that its size
        does not grow with the depth. The token table's padding rows are 0.
        """
        # On the CPU and in float32 whatever the model's device and dtype: the same values everywhere.
        generator = torch.Generator().manual_seed(seed)
        projection_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for name, p in self.named_parameters():
            if p.dim() == 1:
                p.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                std = projection_std if "_proj." in name else INIT_STD
                p.copy_(torch.empty(p.shape).normal_(0.0, std, generator=generator))
        self.wte[self.config.vocab_size :].zero_()

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        cache: KVCache | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Return the loss if targets are given, else the logits.

        Args:
            tokens_BT: (B, T) int64, T from 1 to ``block_size``.
            targets_BT: (B, T) int64: the next token at each position; -100 is ignored.
            cache: keys and values of the tokens before these; these are added to it.
            seed: seed of dropout, 0 to 2^63 - 1; use another one for each step and process.

        Returns:
            The mean loss in nats per token, a float32 scalar. The logits are never stored whole,
            except with ``torch`` and ``eager``, and inside ``weft.batch_invariant()``. Without targets:
            logits in the parameters' dtype, (B, T, V), or with a cache those of the last token, (B, 1, V).

        Raises:
            WeftError: no tokens, more tokens than positions, shapes that do not match, a cache of another
                batch; training with dropout and without ``seed``; inside ``weft.batch_invariant()`` an
                operator that has no batch-invariant implementation here.
        """
        first_position = 0 if cache is None else cache.length
        self._check_shapes(tokens_BT, targets_BT, first_position)
        if cache is not None:
            cache.check_new_tokens(*tokens_BT.shape)
            cache.begin(tokens_BT.shape[1])
        seeds, impls = self._dropout_seeds(seed), implementations_of(self, tokens_BT)
        # Both tables in one pass; its backward sums each row in a fixed order, without atomics.
        wpe = self.wpe[first_position:] if first_position else self.wpe
        x_BTC = ops.embedding(tokens_BT, self.wte, wpe, impl=impls["embedding"])
        if seeds is not None:
            # Site 0; the blocks' sites follow.
            x_BTC = ops.dropout(x_BTC, p=seeds.p, seed=seeds.at(0), impl=impls["dropout"])
        delta_BTC = None
        for block in self.h:
            delta_BTC, x_BTC = block(delta_BTC, x_BTC, seeds, cache)
        last_site = 3 * self.config.layers
        norm_BTC, _ = add_norm(delta_BTC, x_BTC, self.ln_f, impls, seeds, last_site)
        if cache is not None:
            cache.advance(tokens_BT.shape[1])
            # Sampling needs the next token only: the head's product for the others would be wasted.
            norm_BTC = norm_BTC[:, -1:]
        if targets_BT is None:
            return self._logits(norm_BTC)
        return self._loss(norm_BTC.flatten(0, 1), targets_BT.flatten(), impls["linear_cross_entropy"])

    def _head_weight(self) -> Tensor:
        """Token table without its padding rows, which must not take part in the softmax."""
        vocab_size = self.config.vocab_size
        return self.wte if vocab_size == len(self.wte) else self.wte[:vocab_size]

    def _logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of rows (..., C)."""
        if invariance.is_requested():  # of the padded table, whose rows are whole 16 bytes
            return ops.linear(x, self.wte)[..., : self.config.vocab_size]
        return F.linear(x, self._head_weight())

    def _loss(self, x_NC: Tensor, targets_N: Tensor, impl: str | None) -> Tensor:
        if invariance.is_requested():  # linear_cross_entropy has no batch-invariant implementation
            return ops.cross_entropy(self._logits(x_NC), targets_N)
        if impl == "torch":
            # A product over the padded table is faster; the padding's logits are cut off after it.
            logits_NV = F.linear(x_NC, self.wte)[:, : self.config.vocab_size]
            return F.cross_entropy(logits_NV.float(), targets_N)
        return ops.linear_cross_entropy(x_NC, self._head_weight(), targets_N, impl=impl)

    def _dropout_seeds(self, seed: int | None) -> DropoutSeeds | None:
        if not (self.training and self.config.dropout):
            return None
        if seed is None:
            hint = "compute it from the run's seed and the step, so that a step can be repeated"
            raise WeftError("GPT: dropout", expected="seed=", got="none", hint=hint)
        return DropoutSeeds(self.config.dropout, seed)

    def _check_shapes(self, tokens_BT: Tensor, targets_BT: Tensor | None, first_position: int) -> None:
        longest = self.config.block_size - first_position
        if tokens_BT.dim() != 2 or not 1 <= tokens_BT.shape[1] <= longest:
            expected = f"(B, T) with T of 1 to {longest}"
            raise WeftError("GPT: tokens", expected=expected, got=tuple(tokens_BT.shape))
        if targets_BT is not None and targets_BT.shape != tokens_BT.shape:
            expected_shape, shape = tuple(tokens_BT.shape), tuple(targets_BT.shape)
            raise WeftError("GPT: targets", expected=expected_shape, got=shape)
