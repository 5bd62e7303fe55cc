"""``weft.patch`` on models of Hugging Face: same results, correct report, undo."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from helpers.nn_rule import Answers, answers, assert_within, in_float64
from weft import WeftError
from weft.nn import measure, step_table
from weft.nn.patching import attention

NEEDS = "needs transformers: pip install 'weft[transformers]'"
transformers = pytest.importorskip("transformers", reason=NEEDS)
LENGTH, WORDS, WINDOW = 17, 97, 5


def gpt2(**more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_head=2,
        n_embd=32,
        vocab_size=WORDS,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.3,
        **{"n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **more},
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        max_position_embeddings=64,
        initializer_range=0.3,
        **{"num_hidden_layers": 2, **more},
    )
    return transformers.LlamaForCausalLM(config)


def relative(name: str, **more: Any) -> Any:
    """A relative of Llama with windows shorter than the sequences, and with caps where it has them."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=WORDS,
        max_position_embeddings=64,
        initializer_range=0.1,
        sliding_window=WINDOW,
        **{"num_hidden_layers": 2, **more},
    )
    return getattr(transformers, f"{name}ForCausalLM")(config)


CAPS = {"attn_logit_softcapping": 0.05, "final_logit_softcapping": 0.3, "query_pre_attn_scalar": 8}
MODELS: dict[str, Callable[..., Any]] = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": partial(relative, "Mistral"),
    "qwen3": partial(relative, "Qwen3"),
    "gemma2": partial(relative, "Gemma2", **CAPS),
}
LIKE_LLAMA = {"norm", "embedding", "mlp", "rope", "block", "attention", "loss"}
KINDS = {
    "gpt2": LIKE_LLAMA - {"rope"},
    "llama": LIKE_LLAMA,
    "mistral": LIKE_LLAMA,
    "qwen3": LIKE_LLAMA,
    "gemma2": LIKE_LLAMA - {"embedding", "block"},  # the one is scaled, the other has four norms
}
WITHOUT_WINDOW = ("gpt2", "llama", "qwen3")
ONE_LAYER = {"gpt2": {"n_layer": 1}}


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(0, WORDS, (2, LENGTH))
    labels = ids.clone()
    labels[0, 4] = -100
    return {"input_ids": ids, "labels": labels}


def ask(model: Any, **more: Any) -> Answers:
    """Return loss, logits if there are any, and all gradients."""

    def call(model: Any) -> tuple[torch.Tensor, ...]:
        out = model(**batch(), **more)
        return tuple(t for t in (out.loss, out.logits) if t is not None)

    return answers(model, call)


def inside(model: Any) -> Any:
    """Return the attributes of each module and of the config, by identity."""
    holders = [*model.modules(), model.config]
    return [{name: id(value) for name, value in vars(holder).items()} for holder in holders]


@pytest.mark.parametrize("name", MODELS)
def test_patched_model_equals_and_undo_restores_the_bits(name: str) -> None:
    model = MODELS[name]().train()
    truth, own = ask(in_float64(model)), ask(model)
    before, keys = inside(model), {k: v.data_ptr() for k, v in model.state_dict().items()}
    report = weft.patch(model)
    assert {row.kind for row in report.replaced} == KINDS[name]
    assert {k: v.data_ptr() for k, v in model.state_dict().items()} == keys
    assert_within(ask(model), own, truth)
    report.undo()
    assert inside(model) == before
    again = ask(model)
    assert again.keys() == own.keys() and all(torch.equal(again[k], own[k]) for k in own)
    report.undo()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gemma2"])
def test_fused_head_and_loss_return_no_logits(name: str) -> None:
    model = MODELS[name]().train()

    def loss(model: Any) -> Answers:
        return answers(model, lambda m: m(**batch()).loss)

    truth, own = loss(in_float64(model)), loss(model)
    with weft.patch(model, keep_logits=False) as report:
        assert [r.by for r in report.rows if r.kind == "head"] == [
            "weft.ops.linear_cross_entropy in training"
        ]
        assert model(**batch()).logits is None
        assert_within(loss(model), own, truth)
        counted = model(**batch(), num_items_in_batch=7).loss
        model.eval()
        assert model(**batch()).logits.shape == (2, LENGTH, WORDS)
        without = model(input_ids=batch()["input_ids"])
        assert without.loss is None and without.logits is not None
    model.train()
    torch.testing.assert_close(counted, model(**batch(), num_items_in_batch=7).loss)
    as_tuple = model(**batch(), return_dict=False)
    with weft.patch(model, keep_logits=False):
        assert len(model(**batch(), return_dict=False)) == len(as_tuple) - 1


@pytest.mark.parametrize("name", MODELS)
def test_padding_and_generation_do_not_change(name: str) -> None:
    model = MODELS[name]().eval()
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, :5] = 0
    model_inputs = {"input_ids": batch()["input_ids"], "attention_mask": mask}
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    want, words = model(**model_inputs).logits, model.generate(**model_inputs, **settings)
    with weft.patch(model):
        torch.testing.assert_close(model(**model_inputs).logits, want, rtol=1e-4, atol=1e-4)
        assert torch.equal(model.generate(**model_inputs, **settings), words)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_patched_model_compiles_without_graph_breaks(name: str) -> None:
    model = MODELS[name](**ONE_LAYER.get(name, {"num_hidden_layers": 1})).train()
    want = ask(model)
    with weft.patch(model):
        assert_near(model(**batch(), use_cache=False).loss, want["output 0"])
        traced = torch.compile(model, fullgraph=True, backend="eager")
        loss = traced(**batch(), use_cache=False).loss
        assert_near(loss, want["output 0"])


@pytest.mark.parametrize("name", MODELS)
def test_under_autocast_and_checkpointing(name: str) -> None:
    model = MODELS[name]().train()

    def cast() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch(), use_cache=False)

    want = cast()
    with weft.patch(model):
        got = cast()
        assert got.logits.dtype == want.logits.dtype and got.loss.dtype == want.loss.dtype
        torch.testing.assert_close(got.loss, want.loss, rtol=0.02, atol=0.02)
        plain = ask(model, use_cache=False)
        model.activation_checkpointing_enable()
        saved = ask(model, use_cache=False)
        model.activation_checkpointing_disable()
    for key, value in plain.items():
        torch.testing.assert_close(saved[key], value)


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call of transformers' own attention fail."""

    def raises(*_: Any, **__: Any) -> Any:
        raise AssertionError("transformers' attention was called")

    monkeypatch.setattr(attention, "_sdpa", raises)
    monkeypatch.setattr(attention, "_eager", raises)


@pytest.mark.parametrize("name", MODELS)
def test_windows_and_caps_are_computed_by_weft_in_training_and_behind_a_cache(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[name]().eval()
    ids, settings = batch()["input_ids"], {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    want, words = model(input_ids=ids).logits, model.generate(ids, **settings)
    with weft.patch(model):
        forbid(monkeypatch)
        assert_near(model(input_ids=ids).logits, want)
        assert torch.equal(model.generate(ids, **settings), words)
        monkeypatch.undo()
    for option in {"mistral": ("sliding_window",), "gemma2": tuple(CAPS)[:1]}.get(name, ()):
        # It matters here: without it the model computes something else.
        setattr(model.config, option, None)
        other = type(model)(model.config).eval()
        other.load_state_dict(model.state_dict())
        assert float((other(input_ids=ids).logits - want).detach().abs().max()) > 1e-3


def test_a_mask_is_made_where_order_and_window_do_not_describe_it() -> None:
    from transformers import masking_utils

    sliding = masking_utils.sliding_window_causal_mask_function(WINDOW)
    chunks = masking_utils.chunked_causal_mask_function(WINDOW, torch.zeros(2, dtype=torch.int64))
    plain = {"batch_size": 2, "q_length": LENGTH, "kv_length": LENGTH, "local_size": WINDOW}
    plain |= {"mask_function": sliding, "attention_mask": None}
    assert attention.mask(**plain) is None
    assert attention.mask(**plain | {"attention_mask": torch.ones(2, LENGTH, dtype=torch.bool)}) is None
    last = {"q_length": 1, "kv_length": WINDOW, "q_offset": 9, "kv_offset": 10 - WINDOW}
    assert attention.mask(**plain | last) is None
    for more in (
        {"attention_mask": PADDING.bool()},
        {"mask_function": chunks},
        {"allow_is_causal_skip": False},
        {"local_size": WINDOW + 1},
        {"q_length": 1, "q_offset": LENGTH - 1},  # a cache of all keys
        {"q_length": LENGTH - 3, "q_offset": 3},  # a chunk behind a cache
    ):
        mask, want = attention.mask(**plain | more), masking_utils.sdpa_mask(**plain | more)
        assert mask is not None and torch.equal(mask, want), more


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        ("s_aux", "attention", "passes s_aux"),
        ("interleaved", "rope", "not that of projections, a rotation of halves"),
        ("twice", "attention", "does not call the attention that its config names"),
        ("raises", "attention", "a trial call raised ValueError; not today"),
        ("parallel", "block", "its trial call is not x + attention(norm(x))"),
    ],
)
def test_a_module_that_only_looks_like_llamas_is_left(
    change: str, kind: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    own = modeling_llama.LlamaAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if change == "raises":
            raise ValueError("not today")
        if change == "twice":
            own(self, *args, **kwargs)
        return own(self, *args, **kwargs | ({"s_aux": torch.zeros(4)} if change == "s_aux" else {}))

    def interleaved(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        def rotate(x: torch.Tensor) -> torch.Tensor:
            pairs = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
            return x * cos[:, None] + pairs * sin[:, None]

        return rotate(q), rotate(k)

    def parallel(self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, position_ids: Any = None,
                 past_key_values: Any = None, use_cache: Any = False, position_embeddings: Any = None,
                 **kwargs: Any) -> torch.Tensor:  # fmt: skip
        options = {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options, **kwargs)
        normed = self.post_attention_layernorm(hidden_states)
        return hidden_states + attended + self.mlp(normed)  # type: ignore[no-any-return]

    if change == "interleaved":
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", interleaved)
    elif change == "parallel":
        monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", parallel)
    else:
        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    model = llama()
    with weft.patch(model) as report:
        rows = [row for row in report.rows if row.kind == kind]
        assert len(rows) == 2 and all(reason in row.reason for row in rows), rows


def test_dropout_is_replaced_on_request() -> None:
    model = gpt2(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2).train()
    model_inputs = batch()

    def seeded(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(**model_inputs).loss.detach()  # type: ignore[no-any-return]

    with weft.patch(model) as report:
        assert all("random" in r.reason for r in report.unchanged if r.kind == "dropout")
        assert torch.equal(seeded(1), seeded(1)) and not torch.equal(seeded(1), seeded(2))
    with weft.patch(model, dropout=True) as report:
        assert len([r for r in report.replaced if r.kind == "dropout"]) > 0
        assert torch.equal(seeded(1), seeded(1)) and not torch.equal(seeded(1), seeded(2))


def test_report_gives_a_reason_for_each_module() -> None:
    model = gpt2(activation_function="relu", attn_implementation="eager")
    report = weft.patch(model, skip=("loss",))
    rows = {(r.path, r.kind): r for r in report.rows}
    assert rows["transformer.h.1.ln_1", "norm"].by == "weft.ops.layer_norm"
    assert "not GELU's tanh form" in rows["transformer.h.0.mlp", "mlp"].reason
    assert "its mlp is not replaced" in rows["transformer.h.0", "block"].reason
    assert rows["", "loss"].reason == "skipped by skip="
    assert "keep_logits" in weft.patch(llama()).rows[-1].reason
    text = str(report)
    assert "transformer.h.*.ln_1 (2x)" in text and "left to cuBLAS" in text
    assert all(bool(r.by) != bool(r.reason) for r in report.rows)


def test_hooked_and_changed_modules_are_not_replaced() -> None:
    model = gpt2()
    model.transformer.h[0].ln_1.register_forward_hook(lambda *a: None)
    model.transformer.h[1].mlp.c_fc.register_forward_hook(lambda *a: None)
    own = model.transformer.ln_f.forward
    model.transformer.ln_f.forward = lambda x: own(x)
    reasons = {r.path: r.reason for r in weft.patch(model).unchanged}
    assert "hooks" in reasons["transformer.h.0.ln_1"]
    assert "c_fc: it has hooks" in reasons["transformer.h.1.mlp"]
    assert "replaced already" in reasons["transformer.ln_f"]


def test_undo_below_another_change_is_refused() -> None:
    model = gpt2()
    report = weft.patch(model)
    patched, norm = inside(model), model.transformer.ln_f
    ours = norm.forward
    norm.forward = lambda x: ours(x)
    with pytest.raises(WeftError, match=r"LayerNorm.forward was changed"):
        report.undo()
    norm.forward = ours
    assert inside(model) == patched
    report.undo()


def test_copy_of_a_patched_model_is_independent() -> None:
    model = gpt2()
    with weft.patch(model):
        copied = copy.deepcopy(model)
        with torch.no_grad():
            copied.transformer.h[0].ln_1.weight.zero_()
        assert not torch.equal(copied(**batch()).logits, model(**batch()).logits)


def test_patch_of_any_model_with_torch_norms() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU())
    report = weft.patch(model)
    assert [(r.path, bool(r.by)) for r in report.rows] == [("0", False), ("1", True), ("2", False)]


def test_nothing_to_replace_is_an_error_with_reasons() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1))
    with pytest.raises(WeftError, match=r"nothing in this model.*Linear.*hint: .*dropout"):
        weft.patch(model)
    patched = gpt2()
    weft.patch(patched)
    with pytest.raises(WeftError, match=r"patched already.*undo"):
        weft.patch(patched)
    for bad in ({"model": "gpt2"}, {"model": gpt2(), "skip": ("norms",)}):
        with pytest.raises(WeftError) as caught:
            weft.patch(**bad)
        assert caught.value.expected and caught.value.got


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", measure.MODELS)
def test_measure_records_and_tables_every_variant(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "some-device" / f"nn-{name}.json"
    assert step_table.COMMAND in step_table.all_records(tmp_path)
    few = ["--model", name, "--device", "cpu", "--small", "--batch", "1", "--length", "8"]
    assert measure.main([*few, "--save", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["wrong"] == [] and set(record["ways"]) == set(measure.VARIANTS)
    assert all(len(variant["steps_ms"]) == 4 for variant in record["ways"].values())
    text = step_table.all_records(tmp_path)
    assert text.strip() in capsys.readouterr().out and "| unpatched |" in text
    record["ways"]["patched"]["loss"] *= 2
    assert list(measure.loss_differences(record["ways"])) != []
    assert name == "llama" or measure.main([*few[:4], "--small", "--length", "999"]) == 2
    assert measure.main([*few, "--rounds", "0"]) == 2


def traced_operators(model: Any, **more: Any) -> tuple[torch.Tensor, list[Any]]:
    """Return the loss of a traced call in training, and the calls in the graph of its forward."""
    from torch._dynamo.backends.common import aot_autograd

    nodes: list[Any] = []

    def record(graph: Any, inputs: Any) -> Any:
        nodes.extend(node for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    backend = aot_autograd(fw_compiler=record, bw_compiler=lambda graph, inputs: graph.forward)
    torch._dynamo.reset()
    traced = torch.compile(model, fullgraph=True, backend=backend)
    return traced(**{**batch(), **more}, use_cache=False).loss, nodes


PADDING = torch.ones(2, LENGTH, dtype=torch.int64)
PADDING[1, 12:] = 0
PACKED = torch.cat((torch.arange(9), torch.arange(LENGTH - 9))).expand(2, LENGTH)


@pytest.mark.parametrize("name", WITHOUT_WINDOW)
def test_a_traced_model_computes_no_mask_where_attention_is_only_causal(name: str) -> None:
    model = MODELS[name](**ONE_LAYER.get(name, {"num_hidden_layers": 1})).train()
    want = ask(model, use_cache=False)["output 0"]
    report = weft.patch(model)
    loss, nodes = traced_operators(model)
    assert_near(loss, want)
    (attention,) = (n for n in nodes if "scaled_dot_product" in str(n.target))
    assert attention.args[4] is True and attention.kwargs.get("attn_mask") is None  # causal
    compared = ("aten.le", "aten.bitwise_and", "aten.cumsum", "aten.complex", "aten.view_as_complex")
    assert not [n for n in nodes if str(n.target).startswith(compared)]
    report.undo()
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "more", [{"attention_mask": PADDING}, {"position_ids": PACKED}], ids=["padded", "packed"]
)
@pytest.mark.parametrize("name", MODELS)
def test_a_traced_model_keeps_the_masks_of_padded_and_packed_sequences(
    name: str, more: dict[str, torch.Tensor]
) -> None:
    model = MODELS[name]().train()
    want = model(**batch(), **more, use_cache=False).loss
    assert abs(float(want.detach() - model(**batch(), use_cache=False).loss.detach())) > 1e-4
    with weft.patch(model):
        loss, _ = traced_operators(model, **more)
        assert_near(loss, want)
