"""Sampling and ``weft generate``: cache, probabilities, and printed text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from helpers import warp_emulator
from helpers.paths import TESTS
from ops.test_attention_wgmma import toy_map
from weft import WeftError
from weft.cli import app
from weft.core import YES
from weft.dispatch import invariance, operator
from weft.gpt2.model import sampling, weights
from weft.gpt2.model.config import OPS_CHOICES, ModelConfig
from weft.gpt2.model.kv_cache import KVCache
from weft.gpt2.model.model import GPT
from weft.gpt2.model.sampling import generate, generate_with_log_probs, log_probs, stream
from weft.gpt2.report import invariance as report
from weft.gpt2.train import checkpoint
from weft.gpt2.train.checkpoint_files import CHECKPOINTS, MODEL
from weft.ops._common.hopper import tensor_map
from weft.ops.attention import attention_wgmma, packed

EMULATOR = TESTS / "helpers" / "hopper_emulator.hpp"

CONFIG = ModelConfig(vocab_size=256, block_size=24, layers=2, heads=2, width=32)
SAMPLING_OPTIONS = {
    "greedy": {"temperature": 0.0},
    "top-k": {"temperature": 0.9, "top_k": 7, "seed": 3},
    "all": {"temperature": 1.3, "seed": 4},
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sensitive_model(ops: str = "weft") -> GPT:
    """A model whose next token depends on all earlier ones; initial weights give a nearly uniform one."""
    model = GPT(replace(CONFIG, ops=ops, dropout=0.5), seed=1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(12)
    return model


def prompt(length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(CONFIG.vocab_size, (2, length), generator=generator)


@pytest.mark.parametrize(
    ("ops", "length", "count"),
    [("weft", 1, 25), ("weft", 24, 3), ("weft", 31, 3), *((o, 7, 20) for o in OPS_CHOICES)],
)
def test_cache_does_not_change_tokens(ops: str, length: int, count: int) -> None:
    """Prompts of one token, of an odd number, up to the last position, and beyond it."""
    model, prompt_ids = sensitive_model(ops), prompt(length)
    for options in SAMPLING_OPTIONS.values():
        both = [generate(model, prompt_ids, count, cache=c, **options) for c in (True, False)]  # type: ignore[arg-type]
        assert torch.equal(*both)
        assert both[0].shape == (2, length + count) and torch.equal(both[0][:, :length], prompt_ids)
    assert model.training, "as it was before"
    repeated = generate(model, prompt_ids, count, **SAMPLING_OPTIONS["all"])  # type: ignore[arg-type]
    other = generate(model, prompt_ids, count, temperature=1.3, seed=5)
    assert torch.equal(repeated, both[0]) and not torch.equal(repeated, other)


def test_cached_logits_equal_those_of_the_whole_sequence() -> None:
    """Compare the logits of each step; the buffers are never reallocated."""
    model = sensitive_model().eval()
    tokens = prompt(24)
    cache = KVCache(CONFIG, 2, device=torch.device("cpu"), dtype=torch.float32)
    addresses = cache.keys.data_ptr(), cache.values.data_ptr()
    with torch.no_grad():
        whole = model(tokens)
        for start, end in ((0, 5), *((i, i + 1) for i in range(5, 24))):
            last = model(tokens[:, start:end], cache=cache)
            assert last.shape == (2, 1, 256)
            torch.testing.assert_close(last[:, 0], whole[:, end - 1], atol=1e-4, rtol=1e-4)
        with pytest.raises(WeftError, match=r"T of 1 to 0"):
            model(tokens[:, :1], cache=cache)
        cache.clear()
        model(tokens[:, :3], cache=cache)
        with pytest.raises(WeftError, match="expected 2 sequences, got 1"):  # would be copied to both rows
            model(tokens[:1, :1], cache=cache)
    assert addresses == (cache.keys.data_ptr(), cache.values.data_ptr()) and cache.length == 3


def test_window_slides_past_block_size() -> None:
    model = sensitive_model().eval()
    tokens = generate(model, prompt(20), 10, temperature=0.0)
    for end in range(24, 30):
        last = model(tokens[:, end - 24 : end])[:, -1]
        assert torch.equal(tokens[:, end], last.argmax(-1))


def test_tokens_follow_their_probabilities() -> None:
    """4000 samples follow the distribution by a chi-square test with 3 or 1 degrees of freedom."""
    model, rows = GPT(replace(CONFIG, vocab_size=4)), 4000
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.ln_f.bias[0] = 1.0
        model.wte[:4, 0] = torch.tensor([0.0, 1.0, 2.0, 0.5])

    def sample_counts(**options: Any) -> Counter[int]:
        return Counter(next(stream(model, torch.zeros(rows, 1).long(), 1, **options)).tolist())

    logits = torch.tensor([0.0, 1.0, 2.0, 0.5], dtype=torch.float64)
    for options, allowed in (({"temperature": 0.7}, [0, 1, 2, 3]), ({"top_k": 2}, [1, 2])):
        chances = (logits[allowed] / options.get("temperature", 1.0)).softmax(0)
        counts = sample_counts(seed=11, **options)
        assert set(counts) == set(allowed)
        expected = {i: rows * c for i, c in zip(allowed, chances.tolist(), strict=True)}
        assert sum((counts[i] - e) ** 2 / e for i, e in expected.items()) < 20
    assert (
        sample_counts(temperature=0.0)
        == sample_counts(temperature=1e-4)
        == sample_counts(top_k=1)
        == {2: rows}
    )


@pytest.mark.parametrize("ops", OPS_CHOICES)
def test_pieces_of_a_prompt_do_not_change_tokens(ops: str) -> None:
    """Pieces of one token, of several with a shorter last one, and longer ones than the prompt."""
    model, prompt_ids = sensitive_model(ops), prompt(17)
    for options in SAMPLING_OPTIONS.values():
        whole = generate(model, prompt_ids, 9, **options)  # past the last position
        for chunk in (1, 5, 16, 40):
            assert torch.equal(whole, generate(model, prompt_ids, 9, prefill_chunk=chunk, **options)), chunk


# ---- Batch invariance


def differing_log_probs(
    model: GPT, prompts: torch.Tensor, count: int, *, batches: tuple[int, ...], chunks: tuple[int | None, ...]
) -> int:
    """Return how many log-probabilities have other bits in a forward with a gradient than when sampled.

    The forward is one of all prompts; the tokens were generated in batches of each size, from prompts that
    were processed whole and in pieces of each size. There is no tolerance.
    """
    compared = differing = 0
    for batch in batches:
        for seed, chunk in enumerate(chunks):
            options: dict[str, Any] = {"seed": seed, "prefill_chunk": chunk, "batch_invariant": True}
            parts = [generate_with_log_probs(model, p, count, **options) for p in prompts.split(batch)]
            tokens, sampled = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            trained = log_probs(model, tokens, batch_invariant=True)
            assert trained.requires_grad and sampled.shape == (len(prompts), count)
            differing += int((trained[:, -count:] != sampled).sum())
            compared += sampled.numel()
    assert compared == len(prompts) * count * len(batches) * len(chunks)
    return differing


@pytest.fixture
def caches_full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new caches with NaN: what lies behind the cached tokens must not matter."""

    def cache_full_of_nan(*arguments: Any, **options: Any) -> KVCache:
        cache = KVCache(*arguments, **options)
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
        return cache

    monkeypatch.setattr(sampling, "KVCache", cache_full_of_nan)


@pytest.mark.usefixtures("caches_full_of_nan")
def test_sampled_log_probabilities_have_the_bits_of_training() -> None:
    model = sensitive_model()
    model.config = replace(CONFIG, dropout=0.0)
    prompts = torch.cat([prompt(11), prompt(11).flip(0) + 1, prompt(11).roll(3)]) % CONFIG.vocab_size
    assert not differing_log_probs(model, prompts, 9, batches=(1, 4, 6), chunks=(None, 4))
    tokens, with_cache = generate_with_log_probs(model, prompts, 9, batch_invariant=True)
    _, without = generate_with_log_probs(model, prompts, 9, batch_invariant=True, cache=False)
    assert torch.equal(with_cache, without)
    # Without the option the bits differ, so that the comparison can fail; the numbers are those of one model.
    plain = log_probs(model, tokens)[:, -9:]
    assert not torch.equal(plain, with_cache)
    torch.testing.assert_close(plain, with_cache, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("caches_full_of_nan")
@pytest.mark.sampled(1)
@pytest.mark.skipif(warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with")
@pytest.mark.parametrize("length", [125, 200])
def test_emulated_attention_has_the_bits_of_training(
    length: int, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Run the model with Hopper's attention in the emulator; products are computed by rows.

    The tokens cross a tile of 128 keys, and pieces of the prompt begin between two tiles of 64 queries.
    """
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), EMULATOR)
    monkeypatch.setattr(tensor_map, "_encode_heads", toy_map)
    monkeypatch.setattr(attention_wgmma, "num_sms", lambda device: 2)
    monkeypatch.setattr(invariance, "support", lambda *arguments: YES)
    monkeypatch.setattr(operator, "refuse_unsupported", lambda *arguments: None)
    monkeypatch.setattr(packed, "refuse_unsupported", lambda *arguments: None)
    config = replace(CONFIG, block_size=256, heads=2, width=16, layers=2, ops={"attention": "cuda"})
    model = GPT(config, seed=1, dtype=torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(12)
    launches = []
    run = attention_wgmma.forward_with
    monkeypatch.setattr(attention_wgmma, "forward_with", lambda *a: launches.append(a[1].shape[2]) or run(*a))
    prompts = torch.randint(256, (2, length))
    assert not differing_log_probs(model, prompts, 4, batches=(2,), chunks=(None, 70))
    assert {1, 70, length} <= set(launches), "queries of a step, of a piece, and of the whole prompt"
    assert not differing_log_probs(model, prompts, 4, batches=(1,), chunks=(90,))


@pytest.mark.usefixtures("caches_full_of_nan")
@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "vocab_size"), [(4, 256), (2, 50257)])  # heads of 64 and of 128
def test_sampled_log_probabilities_have_the_bits_of_training_on_a_gpu(heads: int, vocab_size: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("batch-invariant attention and products need wgmma, compute capability 9.0")
    config = ModelConfig(vocab_size=vocab_size, block_size=512, layers=3, heads=heads, width=256)
    model = GPT(config, seed=1, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(4)
    prompts = torch.randint(vocab_size, (32, 300), device="cuda")
    batches, chunks = (1, 2, 7, 20, 32), (None, 64, 77)
    assert not differing_log_probs(model, prompts[:20], 24, batches=batches[:-1], chunks=chunks)
    assert not differing_log_probs(model, prompts, 24, batches=batches[-1:], chunks=chunks)


def test_the_report_compares_bits_and_prices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "ROUNDS", 1)
    arguments = ["--device", "cpu", "--preset", "tiny", "--prompt", "8", "--tokens", "3", "--rows", "1"]
    assert report.main(arguments) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-2:] for line in lines if line[:1] == ["batch"]] == [["3", "0"]] * 2
    prices = [line for line in lines if line and line[-1].endswith("x")]
    assert len(prices) == 3 and all(float(line[-2]) > 0 for line in prices)
    monkeypatch.setattr(report, "differing", lambda *arguments: (3, 1))
    assert report.main(arguments) == 1
    for option in ("--prompt", "--tokens", "--rows"):
        with pytest.raises(SystemExit) as refused:
            report.main([*arguments, option, "0"])
        assert refused.value.code == 2


def test_models_with_other_operators_are_not_batch_invariant() -> None:
    for ops in ("torch", "eager"):
        with pytest.raises(WeftError, match='expected ops="weft"'):
            generate(sensitive_model(ops), prompt(3), 2, batch_invariant=True)
    with pytest.raises(WeftError, match="batch_invariant: expected True or False"):
        stream(sensitive_model(), prompt(3), 2, batch_invariant=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_chunk": 0}, "prefill_chunk: expected 1 or more, got 0"),
        ({"prefill_chunk": 4, "cache": False}, "prefill_chunk: expected the cache, got cache=False"),
        ({"count": -1}, "count: expected 0 or more, got -1"),
        ({"top_k": 0}, "top_k: expected 1 or more, got 0"),
        ({"temperature": -0.1}, "temperature: expected 0 or more"),
        ({"tokens": torch.zeros(2, 0).long()}, "expected (B, T), one at least, got (2, 0)"),
        ({"tokens": torch.tensor([[3, 256]])}, "expected 0 to 255, got 256"),
        ({"tokens": torch.tensor([[-2, 25]])}, "expected 0 to 255, got -2"),
    ],
)
def test_invalid_arguments_are_refused_before_the_first_token(options: Any, message: str) -> None:
    with pytest.raises(WeftError) as refused:
        stream(sensitive_model(), **{"tokens": prompt(3), "count": 4, **options})
    assert message in str(refused.value)


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = sensitive_model()
    with torch.no_grad():
        model.ln_f.weight[3] = float("nan")
    with pytest.raises(WeftError, match="logits: expected finite"):
        generate(model, prompt(3), 4)


def folders(root: Path) -> dict[str, Path]:
    """Write one model as a run's directory, a checkpoint and a Hugging Face folder."""
    tensors = {n: p.detach() for n, p in sensitive_model().named_parameters()}
    state = {"plan": {"model": asdict(CONFIG), "tokeniser": "bytes"}}
    files = {MODEL: tensors}
    one = checkpoint.save(root / "run" / CHECKPOINTS, 100, files, state)
    weights.save(root / "hf", CONFIG, tensors)
    return {"run": root / "run", "checkpoint": one, "hugging face": root / "hf"}


def test_generate_prints_the_same_text_from_each_format(tmp_path: Path) -> None:
    def generate_text(folder: Path, *more: str) -> Any:
        arguments = ["generate", str(folder), "--prompt", "def ", "--tokens", "26", "--seed", "2"]
        done = CliRunner().invoke(app, [*arguments, *more], catch_exceptions=False)
        assert done.exit_code == 0 and "M parameters, bytes, on " in done.stderr
        return done

    paths = folders(tmp_path)
    plain = generate_text(paths["run"])
    assert "26 tokens in" in plain.stderr
    assert generate_text(paths["checkpoint"], "--no-cache", "--ops", "eager").stdout == plain.stdout
    reply = json.loads(generate_text(paths["hugging face"], "--tokeniser", "bytes", "--json").stdout)
    assert reply["text"] + "\n" == plain.stdout
    assert len(reply["tokens"]) == 26 and reply["prompt_tokens"] == 4
    pieces = json.loads(
        generate_text(paths["run"], "--prefill-chunk", "3", "--batch-invariant", "--json").stdout
    )
    assert pieces["text"] == reply["text"] and pieces["prefill_chunk"] == 3 and pieces["batch_invariant"]


def test_generate_refuses_unreadable_models(tmp_path: Path) -> None:
    paths = folders(tmp_path)
    for arguments, message in (
        ([str(tmp_path / "nothing")], "expected a folder, got none"),
        ([str(tmp_path)], "holds no checkpoint"),
        ([str(paths["run"]), "--ops", "tritn"], "ops: expected weft, torch, eager"),
        ([str(paths["run"]), "--tokeniser", "words"], "expected bytes or gpt2, got words"),
        ([str(paths["hugging face"])], "the tokeniser gpt2: expected at most 256 tokens"),
    ):
        with pytest.raises(WeftError) as refused:
            CliRunner().invoke(app, ["generate", *arguments], catch_exceptions=False)
        assert message in str(refused.value)


def test_incomplete_characters_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from weft.cli.generate import StreamPrinter
    from weft.gpt2.data.tokenisers import tokeniser

    words = tokeniser("bytes")
    tokens: list[int] = []
    printer = StreamPrinter(words, echo=True)
    seen = []
    for byte in "é!".encode() + b"\xff":
        tokens.append(byte)
        printer.update(tokens)
        seen.append(capsys.readouterr().out)
    printer.end(tokens)
    assert seen == ["", "é", "!", ""] and capsys.readouterr().out == "\ufffd\n"
