"""What a patch is worth: a training step of Hugging Face's GPT-2, timed and its peak memory taken.

    python3 -m weft.nn.measure --save results/<device>/nn-gpt2.json

Ways take turns on one model, each with an optimizer of its own, and their losses must agree. A step
is forward, backward, clipping and AdamW, under autocast in bfloat16 on a GPU. Needs transformers.
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
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from weft import machine, nn
from weft.core import WeftError
from weft.machine.keep import write_json
from weft.nn.patching import patch

FORMAT = 1
CLIP = 1.0
ROUNDS, WARM, STEPS = 5, 3, 10
QUICK = (2, 1, 2)  # the same of a toy
AGREE = 0.02  # by how much of itself a loss in bfloat16 may differ from the unpatched model's
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 512, "n_positions": 64}
Say = Callable[[str], None]

# Whether the model is patched and keeps its logits, and whose AdamW it trains by.
WAYS: dict[str, dict[str, Any]] = {
    "unpatched": {},
    "patched": {"patch": {}},
    "patched, no logits": {"patch": {"keep_logits": False}},
    "patched, no logits, weft.nn.AdamW": {"patch": {"keep_logits": False}, "adamw": True},
}


def build(small: bool, length: int, device: str) -> Any:
    """A GPT-2 of 124 M parameters (or a toy), random, without dropout."""
    if find_spec("transformers") is None:
        hint = "pip install 'weft[transformers]'"
        raise WeftError("the model is transformers' own", got="no transformers", hint=hint)
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(SMALL) if small else {"n_positions": max(length, 1024)}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0, use_cache=False)
    if length > config.n_positions:
        raise WeftError("--length", expected=f"at most {config.n_positions}", got=length)
    return GPT2LMHeadModel(config).to(device).train()


def run(device: str, batch: int, length: int, small: bool, say: Say) -> dict[str, Any]:
    """Every way measured round by round, as a record.

    Each visit patches, trains ``WARM + STEPS`` steps, of which the last ``STEPS`` are timed, and
    puts the model back, its weights too, so that all visits compute the same losses.
    """
    model = build(small, length, device)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), device=device)
    start = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    rounds, warm, steps = QUICK if small else (ROUNDS, WARM, STEPS)
    found: dict[str, dict[str, Any]] = {
        way: {"steps_ms": [], "loss": None, "peak_bytes": None} for way in WAYS
    }
    for number in range(rounds):
        for way, options in WAYS.items():
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(start[name])
            _visit(model, ids, options, found[way], warm, steps)
            say(f"round {number + 1} of {rounds}: {way}: {_median(found[way]):.2f} ms a step")
    return {
        "format": FORMAT,
        "machine": machine.fingerprint(device),
        "transformers": _version(),
        "model": {
            "parameters": sum(p.numel() for p in start.values()),
            "layers": model.config.n_layer,
            "vocabulary": model.config.vocab_size,
        },
        "batch": batch,
        "length": length,
        "dtype": "bfloat16 autocast" if device == "cuda" else "float32",
        "ways": {w: {**data, "median_ms": _median(data)} for w, data in found.items()},
        "wrong": list(disagreements(found)),
    }


def _visit(
    model: Any,
    ids: torch.Tensor,
    options: dict[str, Any],
    into: dict[str, Any],
    warm: int,
    steps: int,
) -> None:
    device = ids.device.type
    more = options.get("patch")
    with nullcontext() if more is None else patch(model, **more):
        step = _step_of(model, ids, bool(options.get("adamw")))
        for _ in range(warm):
            loss = step()
        with _peak(device, into):
            into["steps_ms"] += _timed(step, steps, device)
    into["loss"] = float(loss.detach())
    del step, loss
    model.zero_grad(set_to_none=True)
    gc.collect()


def _step_of(model: Any, ids: torch.Tensor, ours: bool) -> Callable[[], torch.Tensor]:
    parameters = list(model.parameters())
    numbers: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
    cuda = ids.device.type == "cuda"
    optimizer: torch.optim.Optimizer = (
        nn.AdamW(parameters, **numbers, max_norm=CLIP)
        if ours
        else torch.optim.AdamW(parameters, **numbers, fused=True if cuda else None)
    )

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
            loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        if not ours:
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return loss

    return step


def _timed(step: Callable[[], Any], steps: int, device: str) -> list[float]:
    """Steps in ms, one behind the other: between events on a GPU, by the clock on a CPU."""
    if device != "cuda":
        clock = [time.perf_counter()]
        for _ in range(steps):
            step()
            clock.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in pairwise(clock)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [float(a.elapsed_time(b)) for a, b in pairwise(events)]


@contextmanager
def _peak(device: str, into: dict[str, Any]) -> Iterator[None]:
    """The most that tensors held on a GPU at once; a CPU's is not known."""
    if device != "cuda":
        yield
        return
    torch.cuda.reset_peak_memory_stats()
    yield
    into["peak_bytes"] = max(into["peak_bytes"] or 0, torch.cuda.max_memory_allocated())


def _median(data: dict[str, Any]) -> float:
    return float(statistics.median(data["steps_ms"]))


def disagreements(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    own = found["unpatched"]["loss"]
    for way, data in found.items():
        if not abs(data["loss"] - own) <= AGREE * abs(own):
            yield f"{way}: its loss is {data['loss']:.4f}, not {own:.4f}"


def _version() -> str:
    from transformers import __version__

    return str(__version__)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 where the losses disagree, 2 where the call was wrong."""
    parser = argparse.ArgumentParser(prog="python3 -m weft.nn.measure", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cuda", "cpu"), help="a GPU if there is one")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--length", type=int, help="tokens a sequence; 1024, or 64 where small")
    parser.add_argument("--small", action="store_true", help="a toy model: is it all there")
    parser.add_argument("--save", type=Path, metavar="FILE", help="where the record goes")
    parser.add_argument("--json", action="store_true", help="print the record")
    given = parser.parse_args(arguments)
    length = given.length or (SMALL["n_positions"] if given.small else 1024)
    try:
        device = machine.known_kind(given.device)
        record = run(device, given.batch, length, given.small, lambda t: print(t, file=sys.stderr))
        if given.save:
            write_json(given.save, record, what="the record", hint="name another file: --save")
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from weft.nn.figures import drawn

    print(json.dumps(record) if given.json else drawn(record))
    for line in record["wrong"]:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if record["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
