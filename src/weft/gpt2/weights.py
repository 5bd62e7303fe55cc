"""Hugging Face's GPT-2 checkpoints: a folder with ``config.json`` and ``model.safetensors``.

Their products are stored (in, out), ours (out, in) as ``torch.nn.Linear`` has them; their token
table has no padding. Nothing is pickled, and a folder that says it computes something else than
:class:`GPT` does is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from weft.core import WeftError
from weft.gpt2.config import ModelConfig
from weft.gpt2.model import GPT

CONFIG, MODEL = "config.json", "model.safetensors"
PREFIX = "transformer."
THEIRS = {"attn_proj": "attn.c_proj", "c_attn": "attn.c_attn"}
THEIRS |= {"mlp_proj": "mlp.c_proj", "c_fc": "mlp.c_fc"}
SIZES = {
    "vocab_size": "vocab_size",
    "block_size": "n_positions",
    "layers": "n_layer",
    "heads": "n_head",
    "width": "n_embd",
}
# What their configuration may say otherwise, and ours computes in one way: theirs by default.
ONLY: dict[str, tuple[object, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
}
HEAD = "lm_head.weight"
MASKS = (".attn.bias", ".attn.masked_bias")  # constants that old files hold
Tensors = Mapping[str, torch.Tensor]


def theirs(name: str) -> str:
    """Hugging Face's name: of ``h.0.c_fc.bias`` it is ``transformer.h.0.mlp.c_fc.bias``."""
    if name in ("wte", "wpe"):
        return f"{PREFIX}{name}.weight"
    words = [THEIRS.get(word, word) for word in name.split(".")]
    return PREFIX + ".".join(words)


def _turned(name: str) -> bool:
    return name.endswith(".weight") and any(f".{word}." in name for word in THEIRS)


def to_hugging_face(tensors: Tensors, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Ours by their names, in their layout: views but for the products, which are turned."""
    found = {}
    for name, tensor in tensors.items():
        tensor = tensor[: config.vocab_size] if name == "wte" else tensor
        found[theirs(name)] = tensor.t().contiguous() if _turned(name) else tensor
    return found


def from_hugging_face(tensors: Tensors, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Theirs by our names, in our layout, the token table padded with zeros.

    Raises:
        WeftError: a tensor is missing, unknown, or of another shape; a head of its own.
    """
    given = {n if n.startswith((PREFIX, HEAD)) else PREFIX + n: t for n, t in tensors.items()}
    given = {n: t for n, t in given.items() if not n.endswith(MASKS)}
    table, head = given.get(theirs("wte")), given.pop(HEAD, None)
    if head is not None and table is not None and not torch.equal(head, table):
        raise WeftError(HEAD, expected="the token table itself", got="other values")
    shapes = {n: p.shape for n, p in GPT(config, device="meta").named_parameters()}
    found = {}
    for name, shape in shapes.items():
        tensor = given.pop(theirs(name), None)
        if tensor is None:
            raise WeftError(f"{MODEL}: {theirs(name)}", expected=tuple(shape), got="none")
        tensor = tensor.t().contiguous() if _turned(name) else tensor
        expected = (config.vocab_size, config.width) if name == "wte" else tuple(shape)
        if tuple(tensor.shape) != expected:
            where = f"{MODEL}: {theirs(name)}"
            raise WeftError(where, expected=expected, got=tuple(tensor.shape))
        if name == "wte":
            rows = config.padded_vocab - config.vocab_size
            tensor = torch.cat([tensor, tensor.new_zeros(rows, config.width)])
        found[name] = tensor
    if given:
        raise WeftError(f"{MODEL}: tensors of a GPT-2", expected="no others", got=min(given))
    return found


def read_config(folder: Path, **more: Any) -> ModelConfig:
    """The sizes that a folder's ``config.json`` says; ``more`` is of ours: ``ops``, ``dropout``.

    Raises:
        WeftError: it is missing or no JSON, or asks for what :class:`GPT` does not compute.
    """
    try:
        data = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        sizes = {ours: data[name] for ours, name in SIZES.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise WeftError(
            f"{folder / CONFIG}", expected="a GPT-2's configuration", got=got
        ) from error
    inner = data.get("n_inner")
    for name, allowed in {**ONLY, "n_inner": (None, 4 * sizes["width"])}.items():
        given = inner if name == "n_inner" else data.get(name, allowed[0])
        if given not in allowed:
            expected = "none" if allowed[0] is None else allowed[0]
            raise WeftError(f"{folder / CONFIG}: {name}", expected=expected, got=given)
    return ModelConfig(**sizes, **more)


def load(folder: Path, **more: Any) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """A folder's configuration and its tensors by our names, on the CPU, in the dtype they have.

    Raises:
        WeftError: what :func:`read_config` and :func:`from_hugging_face` refuse; no safetensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = read_config(folder, **more)
    try:
        tensors = load_file(folder / MODEL)
    except (OSError, SafetensorError) as error:
        hint = "transformers writes it: model.save_pretrained(folder); pickles are not read"
        got = f"{type(error).__name__}: {error}"
        raise WeftError(f"{folder / MODEL}", expected="safetensors", got=got, hint=hint) from error
    return config, from_hugging_face(tensors, config)


def save(folder: Path, config: ModelConfig, tensors: Tensors) -> None:
    """Write a folder that ``transformers.GPT2LMHeadModel.from_pretrained`` reads.

    ``tensors`` are a :class:`GPT`'s by our names, in the dtype to be written. The weights are
    written beside and renamed, so that a folder never holds half of them.

    Raises:
        WeftError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    given = {n: t.detach().contiguous() for n, t in to_hugging_face(tensors, config).items()}
    beside = folder / f".{MODEL}.tmp"
    dtype = str(next(iter(given.values())).dtype).removeprefix("torch.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(given, beside, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(_config(config, dtype), indent=2) + "\n")
        os.replace(beside, folder / MODEL)
    except (OSError, SafetensorError) as error:
        if beside.exists():
            beside.unlink()
        raise WeftError(f"{folder} cannot be written", got=str(error)) from error


def _config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    sizes = {name: getattr(config, ours) for ours, name in SIZES.items()}
    fixed = {name: allowed[0] for name, allowed in ONLY.items()}
    end = config.vocab_size - 1  # <|endoftext|> is GPT-2's last token
    named = {"architectures": ["GPT2LMHeadModel"], "bos_token_id": end, "eos_token_id": end}
    return {**named, "dtype": dtype, **sizes, **fixed, **dropout, "initializer_range": 0.02}


def build(
    config: ModelConfig, tensors: Tensors, *, device: torch.device | str, dtype: torch.dtype
) -> GPT:
    """A model of these tensors, by our names; none is drawn first."""
    model = GPT(config, device="meta", dtype=dtype)
    placed = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
    model.load_state_dict(placed, assign=True)
    return model


def read(
    path: Path, say: Callable[[str], None] = lambda line: None
) -> tuple[ModelConfig, str | None, dict[str, torch.Tensor]]:
    """A trained model, wherever it is from: configuration, tokeniser's name, tensors by our names.

    Args:
        path: a run's folder, one checkpoint of it, or a Hugging Face folder, which names no
            tokeniser: None.
        say: takes a line for each newer checkpoint of a run that is broken.

    Raises:
        WeftError: there is none, or it cannot be read.
    """
    if not path.is_dir():
        raise WeftError(f"the checkpoint {path}", expected="a folder", got="none")
    if (path / CONFIG).is_file():
        config, tensors = load(path)
        return config, None, tensors
    from weft.gpt2 import checkpoint

    return checkpoint.load_model(path, say)
