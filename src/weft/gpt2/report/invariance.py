"""Batch invariance of a GPT-2: the bits of sampled log-probabilities, and the price beside normal calls.

    python3 -m weft.gpt2.report.invariance > results/<device>/invariant-generation-<date>.txt
    python3 -m weft.gpt2.report.invariance --device cpu --preset tiny --prompt 20 --tokens 6 --rows 4

First table: log-probabilities of generated tokens compared with those of one forward with a gradient, bit by
bit, for several batches and pieces of the prompt; with ``weft.batch_invariant()`` none may differ, and
normal calls show what it prevents. Second table: milliseconds of a step of decoding, of a prompt, of the loss
with its gradient, and of attention's forward, with and without. A time is the median of calls in the order
A B B A. The weights are random: no checkpoint is needed. Exit code 1: a bit differs with batch invariance; 2:
an argument is out of range, or this machine has no batch-invariant kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import weft
from weft.core import WeftError, registry
from weft.gpt2.model.config import preset
from weft.gpt2.model.kv_cache import KVCache
from weft.gpt2.model.model import GPT
from weft.gpt2.model.sampling import generate_with_log_probs, log_probs

ROUNDS = 5  # of A B B A
WEIGHT_FACTOR = 4.0  # initial weights give nearly uniform tokens
# (B, H, T, D) of causal attention; the first is the 124M's in training.
ATTENTION = ((32, 12, 1024, 64), (4, 16, 4096, 128))


def random_model(name: str, device: str) -> GPT:
    """Return a preset with random weights, in bfloat16 on a GPU and in float32 on a CPU."""
    model = GPT(preset(name), device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(WEIGHT_FACTOR)
    return model


def differing(
    model: GPT, prompts: torch.Tensor, count: int, batch: int, chunk: int | None, invariant: bool
) -> tuple[int, int]:
    """Return the number of log-probabilities that were compared, and of those with other bits."""
    options: dict[str, Any] = {"prefill_chunk": chunk, "batch_invariant": invariant}
    parts = [generate_with_log_probs(model, p, count, **options) for p in prompts.split(batch)]
    tokens, sampled = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    trained = log_probs(model, tokens, batch_invariant=invariant)[:, -count:].detach()
    return sampled.numel(), int((trained != sampled).sum())


def milliseconds(calls: Sequence[Callable[[], Any]], device: str, count: int = 1) -> list[float]:
    """Return the median time of each call; ``count`` calls of one are timed together."""

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    times: list[list[float]] = [[] for _ in calls]
    order = [*range(len(calls)), *reversed(range(len(calls)))]
    for i in range(len(calls)):  # compiles and chooses
        for _ in range(5):
            calls[i]()
    for i in order * ROUNDS:
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            calls[i]()
        synchronize()
        times[i].append((time.perf_counter() - start) * 1e3 / count)
    return [statistics.median(t) for t in times]


def in_block(invariant: bool, call: Callable[[], Any]) -> Any:
    """Call a function, if ``invariant`` in a block of batch invariance."""
    if not invariant:
        return call()
    with weft.batch_invariant():
        return call()


def decode_step(model: GPT, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """Return the logits of one more token of each row; the cache keeps its length."""
    with torch.no_grad():
        cache.length -= 1
        return model(tokens[:, -1:], cache=cache)  # type: ignore[no-any-return]


def prefill(model: GPT, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
    with torch.no_grad():
        cache.clear()
        return model(tokens, cache=cache)  # type: ignore[no-any-return]


def train(model: GPT, tokens: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(tokens, tokens).backward()


def prices(model: GPT, prompts: torch.Tensor, device: str) -> Iterator[tuple[str, list[float]]]:
    """Yield what is timed, and its milliseconds without and with batch invariance."""
    for batch in (b for b in (1, 8, 32) if b <= len(prompts)):
        tokens, weights = prompts[:batch], model.wte
        cache = KVCache(model.config, batch, device=weights.device, dtype=weights.dtype)
        size = f"{batch} x {tokens.shape[1]}"
        for name, call in ((f"prompt of {size}", prefill), (f"one token after {size}", decode_step)):
            prefill(model, tokens, cache)
            calls = [partial(in_block, i, partial(call, model, tokens, cache)) for i in (False, True)]
            yield name, milliseconds(calls, device, 10 if call is decode_step else 2)
    calls = [partial(in_block, i, partial(train, model, prompts)) for i in (False, True)]
    yield f"loss and gradient of {len(prompts)} x {prompts.shape[1]}", milliseconds(calls, device)


def attention_prices() -> Iterator[tuple[str, list[float]]]:
    """Yield a shape and the milliseconds of attention's forward: triton, cuda, cuda with batch invariance."""
    for b, h, t, d in ATTENTION:
        q, k, v = (torch.randn(b, t, h, d, device="cuda").bfloat16().transpose(1, 2) for _ in range(3))
        lengths = torch.zeros(b, dtype=torch.int32, device="cuda")
        names = ("triton", "cuda", "cuda/invariant")
        forwards = [registry.implementation("attention", name).forward for name in names]
        calls = [partial(forward, q, k, v, lengths, causal=True) for forward in forwards]
        yield f"{b}x{h}x{t}x{d}-causal", milliseconds(calls, "cuda", 20)


def report(model: GPT, prompts: torch.Tensor, count: int, device: str) -> int:
    """Print both tables; return how many log-probabilities differ with batch invariance."""
    wrong = 0
    print(f"\n{'mode':<16} {'batch':>5} {'pieces':>7} {'compared':>9} {'differing':>9}")
    piece = max(1, prompts.shape[1] // 3 + 1)
    for invariant in (True, False):
        for batch in (b for b in (1, 3, 8, 20, 32) if b <= len(prompts)):
            for chunk in (None, piece):
                compared, other = differing(model, prompts, count, batch, chunk, invariant)
                wrong += other if invariant else 0
                mode = "batch invariant" if invariant else "normal"
                print(f"{mode:<16} {batch:>5} {chunk or 'whole':>7} {compared:>9} {other:>9}", flush=True)
    print(f"\n{'milliseconds':<36} {'normal':>10} {'invariant':>10} {'price':>7}")
    for name, (normal, invariant_time) in prices(model, prompts, device):
        price = f"{invariant_time / normal:.2f}x"
        print(f"{name:<36} {normal:>10.3f} {invariant_time:>10.3f} {price:>7}", flush=True)
    if device == "cuda":
        print(f"\n{'attention forward, milliseconds':<36} {'triton':>10} {'cuda':>10} {'invariant':>10}")
        for name, times in attention_prices():
            print(f"{name:<36} " + " ".join(f"{t:>10.3f}" for t in times), flush=True)
    return wrong


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:  # nothing would be compared, and no bit would differ
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 -m weft.gpt2.report.invariance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--preset", default="124M", help="sizes of the model (%(default)s)")
    parser.add_argument("--prompt", type=_positive, default=512, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--tokens", type=_positive, default=32, help="generated tokens (%(default)s)")
    parser.add_argument("--rows", type=_positive, default=32, help="number of prompts (%(default)s)")
    args = parser.parse_args(arguments)
    try:
        model = random_model(args.preset, args.device)
        generator = torch.Generator().manual_seed(0)
        shape = (args.rows, args.prompt)
        prompts = torch.randint(model.config.vocab_size, shape, generator=generator).to(args.device)
        device_name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        print(f"{device_name}, torch {torch.__version__}, {args.preset}, {model.wte.dtype}")
        wrong = report(model, prompts, args.tokens, args.device)
    except (WeftError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
