"""Sample text: the next token by temperature and top-k, with cached keys and values.

One uniform number from a CPU generator picks a token by inverting the cumulative distribution in
float64. So a seed gives the same tokens with and without the cache, on a CPU and on a GPU, as long as
the logits differ by rounding only. (In bfloat16 two tokens often have equal logits and rounding
decides; ``weft generate`` computes in float32.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from weft import ops
from weft.core import WeftError
from weft.dispatch import invariance
from weft.gpt2.data.tokenisers import Tokeniser
from weft.gpt2.model.kv_cache import KVCache
from weft.gpt2.model.model import GPT

# Settings of the samples that a training run prints.
SAMPLE_PROMPT, SAMPLE_TEMPERATURE, SAMPLE_TOP_K = "\n", 0.8, 50


def generate(model: GPT, tokens: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
    """Return (B, T) tokens with ``count`` new ones appended, (B, T + count) int64.

    ``options`` are those of :func:`stream`.
    """
    new = stream(model, tokens, count, **options)
    return torch.cat([tokens, *(ids[:, None].to(tokens) for ids in new)], dim=1)


def generate_with_log_probs(
    model: GPT, tokens: torch.Tensor, count: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what :func:`generate` does, and the log-probabilities (B, count) of the new tokens.

    They are float32 on the model's device, those of the model itself: before temperature and top-k. With
    ``batch_invariant=True`` they have the bits of :func:`log_probs` of the whole sequence, as long as it is
    not longer than ``block_size``.
    """
    log_probs: list[torch.Tensor] = []
    new = stream(model, tokens, count, log_probs=log_probs, **options)
    ids = torch.cat([tokens, *(ids[:, None].to(tokens) for ids in new)], dim=1)
    empty = torch.empty(len(tokens), 0, device=model.wte.device)
    return ids, torch.cat([empty, *(x[:, None] for x in log_probs)], dim=1)


def log_probs(model: GPT, tokens: torch.Tensor, *, batch_invariant: bool = False) -> torch.Tensor:
    """Return the log-probability of each of the tokens (B, T) but the first, given those before it.

    (B, T - 1) in float32, by one forward; it has a gradient. For ``batch_invariant`` call its ``backward()``
    inside ``weft.batch_invariant()`` too if the model recomputes activations.
    """
    with _invariance(batch_invariant):
        logits = model(tokens[:, :-1])
        return _log_probs(logits.flatten(0, 1), tokens[:, 1:].flatten()).view(len(tokens), -1)


def _log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability (N,) of a token in each row of the logits (N, V)."""
    return -ops.cross_entropy(logits, ids, reduction="none")  # type: ignore[no-any-return]


def _invariance(batch_invariant: bool) -> AbstractContextManager[None]:
    """Return a block that asks for batch invariance, or for nothing new."""
    return invariance.batch_invariant() if batch_invariant else nullcontext()


def sample_text(model: GPT, tokeniser: Tokeniser, count: int, seed: int) -> str:
    """Return ``count`` tokens that follow a line break, as text: the sample of a training run."""
    # A line break is a token of every tokeniser.
    prompt = torch.from_numpy(tokeniser.encode(SAMPLE_PROMPT).astype("int64"))[None]
    ids = generate(model, prompt, count, temperature=SAMPLE_TEMPERATURE, top_k=SAMPLE_TOP_K, seed=seed)
    return tokeniser.decode(ids.flatten().tolist())


def stream(
    model: GPT,
    tokens: torch.Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    cache: bool = True,
    prefill_chunk: int | None = None,
    batch_invariant: bool = False,
    log_probs: list[torch.Tensor] | None = None,
) -> Iterator[torch.Tensor]:
    """Yield new tokens one by one, each (B,) int64 on the CPU.

    Past ``block_size`` the context is the last ``block_size`` tokens. Positions are learned and start
    at the window's first token, so every further token costs a whole forward pass.

    Args:
        model: the model; dropout is off, and its training mode is restored between tokens.
        tokens: (B, T) int64 with T of 1 or more: the prompt. Only its last ``block_size`` count.
        count: number of new tokens.
        temperature: divides the logits; 0 takes the largest, the first of equal ones.
        top_k: sample from the k largest logits (and those equal to the last of them); None: from all.
        seed: seed of the random numbers.
        cache: False computes all earlier tokens again for each new one.
        prefill_chunk: process the prompt in pieces of at most so many tokens, which bounds the memory of
            activations; None: at once. It needs the cache.
        batch_invariant: compute each row in the same way whatever the batch, the cache and the pieces are
            (``weft.batch_invariant``). The logits then have the bits of one forward of the whole sequence.
            On a GPU the model is float16 or bfloat16, and the GPU a Hopper.
        log_probs: a list, to which the log-probabilities (B,) of the new tokens are appended, as
            :func:`generate_with_log_probs` returns them.

    Raises:
        WeftError: an argument out of range, at the call; logits that are not finite, when they occur.
    """
    if tokens.dim() != 2 or 0 in tokens.shape:
        got = tuple(tokens.shape)
        raise WeftError("generate: tokens", expected="(B, T), one at least", got=got)
    smallest, largest = int(tokens.min()), int(tokens.max())
    if smallest < 0 or largest >= model.config.vocab_size:
        expected = f"0 to {model.config.vocab_size - 1}"
        raise WeftError("generate: tokens", expected=expected, got=smallest if smallest < 0 else largest)
    for name, value, minimum in (
        ("count", count, 0),
        ("top_k", top_k, 1),
        ("prefill_chunk", prefill_chunk, 1),
    ):
        if value is not None and value < minimum:
            raise WeftError(f"generate: {name}", expected=f"{minimum} or more", got=value)
    if prefill_chunk is not None and not cache:
        raise WeftError("generate: prefill_chunk", expected="the cache", got="cache=False")
    if not 0.0 <= temperature < float("inf"):
        raise WeftError("generate: temperature", expected="0 or more", got=temperature)
    # The checks above run at the call; a generator function would delay them to the first token.
    sampling = (temperature, top_k, torch.Generator().manual_seed(seed))
    chunk = model.config.block_size if prefill_chunk is None else prefill_chunk
    invariant = invariance.check_flag("generate", batch_invariant)
    return _stream(model, tokens.to(model.wte.device), count, sampling, cache, chunk, invariant, log_probs)


def _stream(
    model: GPT,
    tokens: torch.Tensor,
    count: int,
    sampling: tuple[float, int | None, torch.Generator],
    cache: bool,
    chunk: int,
    batch_invariant: bool,
    log_probs: list[torch.Tensor] | None,
) -> Iterator[torch.Tensor]:
    wte, config = model.wte, model.config
    kv_cache = KVCache(config, len(tokens), device=wte.device, dtype=wte.dtype) if cache else None
    window = tokens[:, -config.block_size :]
    for _ in range(count):
        # Not around the yield: the caller's own calls are not to be batch invariant.
        with _invariance(batch_invariant):
            device_logits = _last_logits(model, window, kv_cache, chunk)
        logits = device_logits.double().cpu()
        if not bool(logits.isfinite().all()):
            raise WeftError("generate: the model's logits", expected="finite", got="NaN or Inf")
        ids = _sample(logits, *sampling)
        if log_probs is not None:
            with _invariance(batch_invariant):
                log_probs.append(_log_probs(device_logits, ids.to(wte.device)))
        yield ids
        window = torch.cat([window, ids[:, None].to(window)], dim=1)
        if window.shape[1] > config.block_size:
            window = window[:, 1:]
            if kv_cache is not None:  # every token has moved by one position
                kv_cache.clear()


@torch.no_grad()
def _last_logits(model: GPT, window: torch.Tensor, kv_cache: KVCache | None, chunk: int) -> torch.Tensor:
    """Return the logits of the window's last token, (B, V); process new tokens ``chunk`` at a time."""
    training = model.training
    if training:  # eval() visits all modules: noticeable at each token of a small model
        model.eval()
    try:
        cached = 0 if kv_cache is None else kv_cache.length
        for tokens in window[:, cached:].split(chunk, dim=1):
            logits: torch.Tensor = model(tokens, cache=kv_cache)
    finally:
        if training:
            model.train()
    return logits[:, -1]


def _sample(
    logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> torch.Tensor:
    """Sample one token for each row of (B, V) logits."""
    if temperature == 0.0:
        return logits.argmax(-1)
    if top_k is not None and top_k < logits.shape[1]:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    # Shifted first, so that a small temperature does not overflow.
    cumulative = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1).cumsum(-1)
    uniform = torch.rand(len(logits), 1, generator=generator, dtype=torch.float64)
    # Times the last sum, which rounding can leave below 1: a number above it would be past the last token.
    # right=True takes the first token whose sum is above the number: never one of probability 0.
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]
