"""Measure a patched training step of a Hugging Face model: its time and its peak memory.

    python3 -m weft.nn.measure --save results/<device>/nn-gpt2.json
    python3 -m weft.nn.measure --model llama --save results/<device>/nn-llama.json

The variants alternate on one model, each with its own optimizer, and their losses must agree. A step is
forward, backward, clipping and AdamW; on a GPU GPT-2 runs under bfloat16 autocast and Llama has bfloat16
weights. Compiled variants use ``torch.compile`` with its defaults. Needs transformers. Where Liger is
installed, it patches the Llama last: its patch cannot be undone.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from weft import machine, nn
from weft.core import WeftError
from weft.machine.keep import write_json
from weft.nn.patching import patch
from weft.nn.step_table import to_markdown

FORMAT = 1
CLIP = 1.0
ROUNDS, WARMUP, STEPS = 3, 4, 10
SMALL_COUNTS = (2, 1, 2)  # rounds, warm-up and timed steps of the small model
MODELS = ("gpt2", "llama")
# Largest relative difference of a loss from the unpatched model's: of rounding in bfloat16.
LOSS_TOLERANCE = 0.02
SMALL_LENGTH = 64
# GPT-2 124M has transformers' default sizes; the other is Llama 3.2 1B.
SMALL_GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 512}
LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMALL_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}

LIGER = "Liger"
# Variants of the step: the arguments of weft.patch, if it is patched, whether it is compiled, and whose AdamW
# it uses.
VARIANTS: dict[str, dict[str, Any]] = {
    "unpatched": {},
    "compiled": {"compile": True},
    "patched": {"patch": {}},
    "patched, compiled": {"patch": {}, "compile": True},
    "patched, no logits": {"patch": {"keep_logits": False}},
    "patched, no logits, compiled": {"patch": {"keep_logits": False}, "compile": True},
    "patched, no logits, weft.nn.AdamW": {"patch": {"keep_logits": False}, "adamw": True},
}


def build(name: str, small: bool, length: int, device: str) -> Any:
    """Build GPT-2 124M or Llama 3.2 1B, or a small model, with random weights and without dropout."""
    if find_spec("transformers") is None:
        hint = "pip install 'weft[transformers]'"
        raise WeftError("the model is transformers' own", got="no transformers", hint=hint)
    torch.manual_seed(0)
    sizes: dict[str, Any]
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = dict(SMALL_GPT2) if small else {}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes |= {"n_positions": SMALL_LENGTH if small else max(length, 1024), **dropout}
        config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
        if length > config.n_positions:
            raise WeftError("--length", expected=f"at most {config.n_positions}", got=length)
        return GPT2LMHeadModel(config).to(device).train()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**(SMALL_LLAMA if small else LLAMA), "max_position_embeddings": length}
    llama = LlamaConfig(**sizes, tie_word_embeddings=True, use_cache=False)
    with torch.device(device):
        model = LlamaForCausalLM(llama)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32).train()


def run(
    name: str,
    device: str,
    batch: int,
    length: int,
    small: bool,
    log: Callable[[str], None],
    rounds: int | None = None,
) -> dict[str, Any]:
    """Measure every variant in every round and return the record.

    A visit patches the model, trains ``WARMUP + STEPS`` steps, of which the last ``STEPS`` are timed, and
    undoes the patch. Each visit starts with the same weights, so all compute the same losses.
    """
    if rounds is not None and rounds < 1:
        raise WeftError("--rounds", expected="1 or more", got=rounds)
    model = build(name, small, length, device)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), device=device)
    start = {key: p.detach().cpu().clone() for key, p in model.named_parameters()}
    default_rounds, warmup, steps = SMALL_COUNTS if small else (ROUNDS, WARMUP, STEPS)
    rounds = default_rounds if rounds is None else rounds
    results: dict[str, dict[str, Any]] = {
        variant: {"steps_ms": [], "loss": None, "peak_bytes": None} for variant in VARIANTS
    }

    def visit(variant: str, options: dict[str, Any], number: int) -> None:
        # The same weights for each visit, so that the losses can be compared.
        with torch.no_grad():
            for key, p in model.named_parameters():
                p.copy_(start[key])
        _measure_variant(model, ids, options, results[variant], warmup, steps)
        log(f"round {number + 1} of {rounds}: {variant}: {_median(results[variant]):.2f} ms a step")

    for number in range(rounds):
        for variant, options in VARIANTS.items():
            visit(variant, options, number)
    versions = {"transformers": version("transformers")}
    if name == "llama" and find_spec("liger_kernel") is not None:
        import_module("liger_kernel.transformers").apply_liger_kernel_to_llama(model=model)
        versions["liger"] = version("liger_kernel")
        results[LIGER] = {"steps_ms": [], "loss": None, "peak_bytes": None}
        for number in range(rounds):
            visit(LIGER, {}, number)
    return {
        "format": FORMAT,
        "machine": machine.fingerprint(device),
        **versions,
        "model": {
            "name": "GPT-2" if name == "gpt2" else "Llama",
            "parameters": sum(p.numel() for p in start.values()),
            "layers": model.config.num_hidden_layers,
            "vocabulary": model.config.vocab_size,
        },
        "batch": batch,
        "length": length,
        "dtype": _dtype(name, device),
        "ways": {v: {**data, "median_ms": _median(data)} for v, data in results.items()},
        "wrong": list(loss_differences(results)),
    }


def _measure_variant(
    model: Any,
    ids: torch.Tensor,
    options: dict[str, Any],
    result: dict[str, Any],
    warmup: int,
    steps: int,
) -> None:
    device = ids.device.type
    patch_options = options.get("patch")
    with nullcontext() if patch_options is None else patch(model, **patch_options):
        # A new optimizer for each visit: its moments are part of the peak memory.
        torch.compiler.reset()  # else code compiled for another variant is tried first
        callee = torch.compile(model) if options.get("compile") else model
        step = _make_step(model, callee, ids, bool(options.get("adamw")))
        for _ in range(warmup):
            loss = step()
        with _peak_memory(device, result):
            result["steps_ms"] += _time_steps(step, steps, device)
    result["loss"] = float(loss.detach())
    # Free the optimizer's state and the gradients before the next variant's peak is measured.
    del step, loss
    model.zero_grad(set_to_none=True)
    gc.collect()


def _dtype(name: str, device: str) -> str:
    if device != "cuda":
        return "float32"
    return "bfloat16 autocast" if name == "gpt2" else "bfloat16"


def _make_step(model: Any, callee: Any, ids: torch.Tensor, weft_adamw: bool) -> Callable[[], torch.Tensor]:
    parameters = list(model.parameters())
    options: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
    cuda = ids.device.type == "cuda"
    autocast = cuda and parameters[0].dtype == torch.float32
    # torch's fastest AdamW on each device, so that the comparison is fair.
    optimizer: torch.optim.Optimizer = (
        nn.AdamW(parameters, **options, max_norm=CLIP)
        if weft_adamw
        else torch.optim.AdamW(parameters, **options, fused=True if cuda else None)
    )

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
            loss: torch.Tensor = callee(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        if not weft_adamw:  # Weft's clips in its step
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return loss

    return step


def _time_steps(step: Callable[[], Any], steps: int, device: str) -> list[float]:
    """Return the milliseconds of consecutive steps: between CUDA events, or by the host's clock."""
    if device != "cuda":
        times = [time.perf_counter()]
        for _ in range(steps):
            step()
            times.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in pairwise(times)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    # Events on the stream, without a wait between steps: the host may run ahead as in training.
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [float(a.elapsed_time(b)) for a, b in pairwise(events)]


@contextmanager
def _peak_memory(device: str, result: dict[str, Any]) -> Iterator[None]:
    """Record the peak of allocated bytes on a GPU; on a CPU it is unknown."""
    if device != "cuda":
        yield
        return
    torch.cuda.reset_peak_memory_stats()
    yield
    result["peak_bytes"] = max(result["peak_bytes"] or 0, torch.cuda.max_memory_allocated())


def _median(data: dict[str, Any]) -> float:
    return float(statistics.median(data["steps_ms"]))


def loss_differences(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a message for each variant whose loss differs from the unpatched model's."""
    expected = results["unpatched"]["loss"]
    for variant, data in results.items():
        # Not "difference > tolerance": a NaN must be a difference.
        if not abs(data["loss"] - expected) <= LOSS_TOLERANCE * abs(expected):
            yield f"{variant}: its loss is {data['loss']:.4f}, not {expected:.4f}"


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 1 if the losses differ, 2 for invalid arguments."""
    parser = argparse.ArgumentParser(prog="python3 -m weft.nn.measure", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument("--model", choices=MODELS, default="gpt2", help="default: gpt2")
    parser.add_argument("--batch", type=int, help="sequences per step; default: 8 of GPT-2, 4 of Llama")
    parser.add_argument(
        "--length", type=int, help="tokens per sequence; default: 1024 or 2048, or 64 with --small"
    )
    parser.add_argument("--rounds", type=int, help=f"visits to each variant; default: {ROUNDS}")
    parser.add_argument("--small", action="store_true", help="a small model, to try the command")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the record to FILE")
    parser.add_argument("--json", action="store_true", help="print the record")
    options = parser.parse_args(arguments)
    is_gpt2 = options.model == "gpt2"
    length = options.length or (SMALL_LENGTH if options.small else 1024 if is_gpt2 else 2048)
    batch = options.batch or (8 if is_gpt2 else 4)
    try:
        device = machine.known_kind(options.device)
        log = partial(print, file=sys.stderr, flush=True)
        record = run(options.model, device, batch, length, options.small, log, options.rounds)
        if options.save:
            write_json(options.save, record, what="the record", hint="name another file: --save")
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(record) if options.json else to_markdown(record))
    for line in record["wrong"]:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if record["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
