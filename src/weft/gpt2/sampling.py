"""Sampling: the next token by temperature and top-k, with keys and values kept between tokens.

A draw takes one uniform number of a generator on the CPU and inverts the distribution's sum in
float64: the same seed gives the same tokens with and without the cache, on a CPU and on a GPU, as
long as the logits differ by rounding only (in bfloat16 two tokens' logits are often equal, and
rounding decides; ``weft generate`` computes in float32).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.core import WeftError
from weft.gpt2.cache import Cache
from weft.gpt2.model import GPT


def generate(
    model: GPT,
    tokens: torch.Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    cache: bool = True,
) -> torch.Tensor:
    """(B, T) tokens and ``count`` more, (B, T + count) int64; see :func:`stream`."""
    options = {"temperature": temperature, "top_k": top_k, "seed": seed, "cache": cache}
    new = list(stream(model, tokens, count, **options))  # type: ignore[arg-type]
    return torch.cat([tokens, *(each[:, None].to(tokens) for each in new)], dim=1)


def stream(
    model: GPT,
    tokens: torch.Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    cache: bool = True,
) -> Iterator[torch.Tensor]:
    """Tokens one after another, each (B,) int64 on the CPU, as they are made.

    Past ``block_size`` the window slides: the last ``block_size`` tokens count. Positions are
    learned and start at the window's first token, so that each further one costs a whole forward.

    Args:
        model: its mode, training or not, is as before between tokens; dropout is off.
        tokens: (B, T) int64, one at least: the prompt; of a longer one the last tokens count.
        count: how many.
        temperature: divides the logits; 0 takes the largest, the first of equals.
        top_k: only the k largest logits count (and what equals the last of them); None: all.
        seed: of the draws.
        cache: whether keys and values are kept; without, each token computes all before it again.

    Raises:
        WeftError: an argument out of range, now; logits that are not finite, when they come.
    """
    if tokens.dim() != 2 or 0 in tokens.shape:
        got = tuple(tokens.shape)
        raise WeftError("generate: tokens", expected="(B, T), one at least", got=got)
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= model.config.vocab_size:
        expected = f"0 to {model.config.vocab_size - 1}"
        raise WeftError("generate: tokens", expected=expected, got=least if least < 0 else most)
    _at_least("count", count, 0)
    _at_least("top_k", 1 if top_k is None else top_k, 1)
    if not 0.0 <= temperature < float("inf"):
        raise WeftError("generate: temperature", expected="0 or more", got=temperature)
    return _stream(model, tokens.to(model.wte.device), count, temperature, top_k, seed, cache)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise WeftError(f"generate: {name}", expected=f"{least} or more", got=value)


def _stream(
    model: GPT,
    tokens: torch.Tensor,
    count: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    cache: bool,
) -> Iterator[torch.Tensor]:
    wte, config = model.wte, model.config
    memory = Cache(config, len(tokens), device=wte.device, dtype=wte.dtype) if cache else None
    generator = torch.Generator().manual_seed(seed)
    window = tokens[:, -config.block_size :]
    for _ in range(count):
        logits = _logits(model, window, memory)
        if not bool(logits.isfinite().all()):
            raise WeftError("generate: the model's logits", expected="finite", got="NaN or Inf")
        drawn = _draw(logits, temperature, top_k, generator)
        yield drawn
        window = torch.cat([window, drawn[:, None].to(window)], dim=1)
        if window.shape[1] > config.block_size:
            window = window[:, 1:]
            if memory is not None:
                memory.clear()


@torch.no_grad()
def _logits(model: GPT, window: torch.Tensor, memory: Cache | None) -> torch.Tensor:
    """(B, V) float64 on the CPU, of the window's last token."""
    training = model.training
    if training:  # a walk over all modules, which is felt at each token of a small model
        model.eval()
    try:
        seen = 0 if memory is None else memory.length
        found = model(window[:, seen:], cache=memory)
    finally:
        if training:
            model.train()
    return found[:, -1].double().cpu()  # type: ignore[no-any-return]


def _draw(
    logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> torch.Tensor:
    """(B,) tokens of (B, V) logits."""
    if temperature == 0.0:
        return logits.argmax(-1)
    if top_k is not None and top_k < logits.shape[1]:
        last = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < last, float("-inf"))
    # Shifted first, so that a small temperature does not overflow.
    sums = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1).cumsum(-1)
    uniform = torch.rand(len(logits), 1, generator=generator, dtype=torch.float64)
    # Of the tokens whose sum is above the draw the first: one of no probability is never taken.
    return torch.searchsorted(sums, uniform * sums[:, -1:], right=True)[:, 0]
