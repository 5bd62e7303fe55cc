"""``weft.gpt2``'s model compared with Hugging Face's: outputs, gradients, training and files."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.nn_rule import Answers, assert_within
from weft import WeftError
from weft.gpt2.model import weights
from weft.gpt2.model.config import ALIASES, GPU_IMPLEMENTATIONS, OPS_CHOICES, PRESETS, ModelConfig, preset
from weft.gpt2.model.model import GPT
from weft.nn import AdamW

NEEDS = "needs transformers: pip install 'weft[transformers]'"
BATCH, LENGTH, WORDS = 6, 32, 131
CONFIG = ModelConfig(vocab_size=WORDS, block_size=LENGTH, layers=2, heads=4, width=64)
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def peer() -> Any:
    """Hugging Face's model, with random weights large enough that every part matters."""
    transformers = pytest.importorskip("transformers", reason=NEEDS)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2,
            n_head=4,
            n_embd=64,
            n_positions=LENGTH,
            vocab_size=WORDS,
            bos_token_id=0,
            eos_token_id=0,
            initializer_range=0.2,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
    )
    with torch.no_grad():  # norms of 1 and biases of 0 would hide a mistake with them
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape) * 0.2)
    return model.eval()


def ours(peer: Any, kind: torch.dtype, config: ModelConfig = CONFIG) -> GPT:
    """Build our model with the same weights."""
    own = dict(peer.named_parameters())
    tensors = weights.from_hugging_face({n: p.detach().clone() for n, p in own.items()}, config)
    return weights.build(config, tensors, device="cpu", dtype=kind)


def batch(count: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and Hugging Face's labels, two of which are ignored."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(WORDS, (count, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[0, 4] = labels[2, 31] = -100
    return tokens, labels


def following(labels: torch.Tensor) -> torch.Tensor:
    """Return each position's target: the label after it."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def each_loss(loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the losses of many sequences: the peer's error in a single number could be almost 0 by chance,
    and the rule would then allow none."""
    tokens, labels = batch(32)
    with torch.no_grad():
        pairs = zip(tokens.split(1), labels.split(1), strict=True)
        return torch.stack([loss_of(x, y) for x, y in pairs])


def asked_of_peer(model: Any) -> Answers:
    where = model.device
    tokens, labels = (t.to(where) for t in batch())
    out = model(tokens, labels=labels)
    out.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    losses = each_loss(lambda x, y: model(x.to(where), labels=y.to(where)).loss)
    return {"logits": out.logits.detach(), "losses": losses, **gradients}


@pytest.fixture(scope="module")
def truth(peer: Any) -> Answers:
    return asked_of_peer(copy.deepcopy(peer).double())


@pytest.fixture(scope="module")
def owns(peer: Any) -> dict[str, Answers]:
    return {name: asked_of_peer(copy.deepcopy(peer).to(kind)) for name, kind in KINDS.items()}


@pytest.mark.parametrize("ops", OPS_CHOICES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_gradients_equal_hugging_face(
    peer: Any, truth: Answers, owns: dict[str, Answers], kind: str, ops: str
) -> None:
    model = ours(peer, KINDS[kind], replace(CONFIG, ops=ops))
    tokens, labels = batch()
    logits, loss = model(tokens).detach(), model(tokens, following(labels))
    losses = each_loss(lambda x, y: model(x, following(y)))
    flat = following(labels).flatten()
    mean = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), flat)
    torch.testing.assert_close(loss.detach(), mean)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert not gradients["wte"][WORDS:].any(), "the padding is no token"
    named_gradients = weights.to_hugging_face(gradients, CONFIG)
    assert_within({"logits": logits, "losses": losses, **named_gradients}, owns[kind], truth)


def test_ops_mapping_selects_implementations(peer: Any) -> None:
    tokens, labels = batch()
    named = {"attention": "eager", "linear_cross_entropy": "torch"}
    mixed = ours(peer, torch.float32, replace(CONFIG, ops=named))
    whole = ours(peer, torch.float32)
    got, want = (m(tokens, following(labels)) for m in (mixed, whole))
    torch.testing.assert_close(got, want)
    assert replace(CONFIG, ops=named).implementations()[True]["add_layer_norm"] == "triton"


def test_ten_steps_of_adamw_give_torch_losses(peer: Any) -> None:
    """Compare Hugging Face's model with torch's optimizer, in float64 and float32, with ours."""
    tokens, labels = batch()

    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        several = [[p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (1, 0)]
        rates = zip(several, (0.1, 0.0), strict=True)
        return [{"params": p, "weight_decay": decay} for p, decay in rates]

    def trained(model: Any, optimizer: Any, loss_of: Any) -> torch.Tensor:
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    def theirs(kind: torch.dtype) -> torch.Tensor:
        model = copy.deepcopy(peer).to(kind)
        optimizer = torch.optim.AdamW(groups(model), lr=1e-2, betas=(0.9, 0.95))
        return trained(model, optimizer, lambda m: m(tokens, labels=labels).loss)

    want = theirs(torch.float64)
    assert want[-1] < 0.5 * want[0]
    model = ours(peer, torch.float32)
    optimizer = AdamW(groups(model), lr=1e-2, betas=(0.9, 0.95))
    got = trained(model, optimizer, lambda m: m(tokens, following(labels)))
    assert_within({"losses": got}, {"losses": theirs(torch.float32)}, {"losses": want})


def test_hugging_face_folders_round_trip(peer: Any, tmp_path: Path) -> None:
    """transformers writes, we read and write, transformers reads: the same bits and logits."""
    transformers = pytest.importorskip("transformers", reason=NEEDS)
    peer.save_pretrained(tmp_path / "theirs")
    config, tensors = weights.load(tmp_path / "theirs")
    assert config == CONFIG
    assert tensors["wte"].shape == (256, 64) and not tensors["wte"][WORDS:].any()
    assert set(tensors) == {n for n, _ in GPT(CONFIG, device="meta").named_parameters()}

    weights.save(tmp_path / "ours", config, tensors)
    back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    for (name, want), (other, got) in zip(peer.state_dict().items(), back.state_dict().items(), strict=True):
        assert name == other and torch.equal(got, want), name
    tokens = batch()[0]
    assert torch.equal(back.eval()(tokens).logits, peer(tokens).logits)
    assert [p.name for p in (tmp_path / "ours").glob(".*")] == []

    # As the published files are: no prefix, constants beside, the head once more.
    file = tmp_path / "ours" / weights.MODEL
    plain = {n.removeprefix("transformer."): t for n, t in load_file(file).items()}
    plain["h.0.attn.bias"] = torch.ones(1, 1, LENGTH, LENGTH)
    plain["lm_head.weight"] = plain["wte.weight"].clone()
    save_file(plain, file)
    again = weights.load(tmp_path / "ours")[1]
    assert all(torch.equal(again[n], t) for n, t in tensors.items())


def test_presets_are_the_published_sizes() -> None:
    """Hugging Face's own counts, and the rows that pad the token table."""
    published = {"124M": 124439808, "350M": 354823168, "774M": 774030080, "1.5B": 1557611200}
    for name, count in published.items():
        config = PRESETS[name]
        model = GPT(config, device="meta")
        padding = (config.padded_vocab - config.vocab_size) * config.width
        assert sum(p.numel() for p in model.parameters()) == config.parameters == count + padding
        assert config.padded_vocab == 50304
    assert preset("gpt2-xl") is PRESETS["1.5B"] and set(ALIASES.values()) <= set(PRESETS)
    assert round(PRESETS["124M"].flops_per_token(1024) / 1e6, 1) == 803.5
    with pytest.raises(WeftError, match="preset"):
        preset("gpt3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers: expected an integer of 1 or more, got 0"),
        ({"width": 60}, "heads: expected a divisor of the width 60, with heads of a multiple of 8"),
        ({"dropout": 1.0}, "dropout: expected 0 to below 1, got 1.0"),
        ({"ops": "tritn"}, "ops: expected weft, torch, eager"),
        ({"ops": {"attention": "tritn"}}, "implementation of attention"),
        ({"ops": {"softmax": "triton"}}, "operator of a GPT-2"),
    ],
)
def test_invalid_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeftError) as refused:
        replace(CONFIG, **changes)
    assert message in str(refused.value)


def test_initial_weights_are_gpt2s_in_every_dtype() -> None:
    config = replace(CONFIG, layers=8, width=128)
    model, half = GPT(config, seed=5), GPT(config, seed=5, dtype=torch.bfloat16)
    other = GPT(config, seed=6)
    for (name, p), q, r in zip(model.named_parameters(), half.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.bfloat16(), q)
        if p.dim() == 1:
            assert torch.equal(p, torch.full_like(p, float("ln_" in name and "weight" in name)))
            continue
        assert not torch.equal(p, r)
        std = p[:WORDS].std().item() if name == "wte" else p.std().item()
        assert std == pytest.approx(0.02 / 4 if "proj" in name else 0.02, rel=0.03), name
    assert not model.wte[WORDS:].any()


def test_saved_activations_match_the_model_docstring() -> None:
    """A block saves 16 U besides its parameters; 3 blocks less 2 leave out the ends of the model."""

    def saved_bytes(layers: int) -> int:
        model = GPT(replace(CONFIG, layers=layers, ops="torch"))
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, torch.Tensor] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in own:
                storages[x.untyped_storage().data_ptr()] = x  # a live reference, so that no address is reused
            return x

        tokens, labels = batch()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(tokens, following(labels))
        assert loss.isfinite()
        return sum(x.untyped_storage().nbytes() for x in storages.values())

    unit = BATCH * LENGTH * 64 * 4
    # Beside it two float32 for each row of both norms, and one for each query of each head.
    small = (4 + 4) * BATCH * LENGTH * 4
    assert saved_bytes(3) - saved_bytes(2) == 16 * unit + small


def test_dropout_depends_only_on_its_seed() -> None:
    tokens, labels = batch()
    losses = {}
    for ops in OPS_CHOICES:
        model = GPT(replace(CONFIG, dropout=0.2, ops=ops))
        seeded_losses = [model(tokens, following(labels), seed=s).item() for s in (7, 7, 8)]
        assert seeded_losses[0] == seeded_losses[1] != seeded_losses[2]
        losses[ops] = seeded_losses[0]
        with pytest.raises(WeftError, match="dropout"):
            model(tokens, following(labels))
        plain = GPT(CONFIG)(tokens, following(labels))
        assert model.eval()(tokens, following(labels)).item() == pytest.approx(plain.item())
    # Every implementation drops the same elements.
    assert losses["torch"] == pytest.approx(losses["weft"], rel=1e-6)
    assert losses["eager"] == pytest.approx(losses["weft"], rel=1e-6)


def test_invalid_tokens_and_targets_are_refused() -> None:
    model, tokens = GPT(CONFIG), batch()[0]
    for wrong, targets, message in (
        (tokens[0], None, "expected (B, T) with T of 1 to 32, got (32,)"),
        (tokens[:, :0], None, "got (6, 0)"),
        (torch.cat([tokens, tokens], 1), None, "got (6, 64)"),
        (tokens, tokens[:, 1:], "GPT: targets: expected (6, 32), got (6, 31)"),
        (tokens + WORDS, None, "embedding"),
        (tokens, tokens + WORDS, "linear_cross_entropy"),
    ):
        with pytest.raises(WeftError) as refused:
            model(wrong, targets)
        assert message in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("ops", ["weft", "torch"])
def test_model_compiles_without_graph_breaks(peer: Any, ops: str) -> None:
    """torch.compile traces loss and gradients without a graph break, and their values do not change."""
    tokens, labels = batch()
    config = replace(CONFIG, ops=ops)
    plain, traced = ours(peer, torch.float32, config), ours(peer, torch.float32, config)
    want = plain(tokens, following(labels))
    got = torch.compile(traced, fullgraph=True, backend="aot_eager")(tokens, following(labels))
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want)
    for (name, p), q in zip(traced.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("mlp", ["one operator", "two operators"])
def test_gpu_implementations_compute_the_same_model(mlp: str) -> None:
    """Triton's interpreted kernels of the operators that ``weft`` selects on a GPU give torch's loss and
    gradients."""
    config = ModelConfig(vocab_size=97, block_size=9, layers=1, heads=2, width=16)
    named = dict.fromkeys([*GPU_IMPLEMENTATIONS, "embedding", "layer_norm", "linear_gelu"], "triton")
    if mlp == "one operator":
        named["mlp_gelu"] = "triton"
    plain, kernels = GPT(config), GPT(replace(config, ops=named))
    tokens = batch()[0][:2, :9] % 97
    want, got = (m(tokens, tokens.roll(-1, 1)) for m in (plain, kernels))
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want)
    for (name, p), q in zip(kernels.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


class OperatorCalls(TorchDispatchMode):
    """Counts the calls of Weft's operators, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "weft":
            self.counts[func._schema.name.removeprefix("weft::")] += 1
        return func(*args, **(kwargs or {}))


def gradients_and_calls(config: ModelConfig) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Return the loss and all gradients of a step by name, and the calls of Weft's operators."""
    model, tokens = GPT(config), batch()[0][:2, :9] % 97
    with OperatorCalls() as calls:
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}, calls.counts


def test_one_operator_has_the_mlp_of_a_block_and_changes_no_number() -> None:
    """A step calls a third fewer operators for its linear layers, and has the same loss and gradients."""
    config = ModelConfig(vocab_size=97, block_size=9, layers=3, heads=2, width=16)
    named = {"linear": "triton", "linear_gelu": "triton"}
    two, calls_of_two = gradients_and_calls(replace(config, ops=named))
    one, calls_of_one = gradients_and_calls(replace(config, ops={**named, "mlp_gelu": "triton"}))
    assert all(torch.equal(two[name], t) for name, t in one.items()) and one.keys() == two.keys()
    for suffix in ("", "_backward"):
        assert calls_of_two[f"linear{suffix}"] == 9 and calls_of_two[f"linear_gelu{suffix}"] == 3
        assert calls_of_one[f"linear{suffix}"] == 6 and calls_of_one[f"mlp_gelu{suffix}"] == 3
    assert "linear_gelu" not in calls_of_one and "mlp_gelu" not in calls_of_two
    assert calls_of_one.total() == calls_of_two.total() - 6


@pytest.mark.parametrize("ops", ["weft", "torch", "eager", {"linear": "cuda"}], ids=str)
def test_the_mlp_is_two_operators_unless_the_one_is_named(ops: Any) -> None:
    assert replace(CONFIG, ops=ops).implementations()[True]["mlp_gelu"] is None
    named = {**(ops if isinstance(ops, dict) else {}), "mlp_gelu": "cuda"}
    assert replace(CONFIG, ops=named).implementations()[True]["mlp_gelu"] == "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("ops", OPS_CHOICES)
def test_gpu_equals_hugging_face_and_is_deterministic(peer: Any, truth: Answers, ops: str) -> None:
    on_gpu = {n: t.cpu() for n, t in asked_of_peer(copy.deepcopy(peer).cuda().bfloat16()).items()}
    tokens, labels = (t.cuda() for t in batch())
    seen = []
    for _ in range(2):
        model = ours(peer, torch.bfloat16, replace(CONFIG, ops=ops)).cuda()
        logits = model(tokens).detach()
        model(tokens, following(labels)).backward()
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results = {"logits": logits, **weights.to_hugging_face(named, CONFIG)}
        seen.append({n: t.cpu() for n, t in results.items()})
    losses = each_loss(lambda x, y: model(x.cuda(), following(y).cuda())).cpu()
    assert_within({"losses": losses, **seen[0]}, on_gpu, truth)
    if ops == "weft":
        assert [n for n, t in seen[0].items() if not torch.equal(t, seen[1][n])] == []
