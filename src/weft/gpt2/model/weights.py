"""Read and write trained models: Hugging Face's GPT-2 folders, and checkpoints of Weft's runs.

A Hugging Face folder has ``config.json`` and ``model.safetensors``. Its linear weights are stored
(in, out), ours (out, in) as in ``torch.nn.Linear``; its token table has no padding. Nothing is
pickled, and a configuration that asks for something that :class:`GPT` does not compute is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from weft.core import WeftError
from weft.core.json_files import read_json
from weft.gpt2.model.config import ModelConfig
from weft.gpt2.model.model import GPT
from weft.gpt2.train import checkpoint

CONFIG, MODEL = "config.json", "model.safetensors"
PREFIX = "transformer."
# Our module names and Hugging Face's.
MODULES = {"attn_proj": "attn.c_proj", "c_attn": "attn.c_attn"}
MODULES |= {"mlp_proj": "mlp.c_proj", "c_fc": "mlp.c_fc"}
SIZES = {
    "vocab_size": "vocab_size",
    "block_size": "n_positions",
    "layers": "n_layer",
    "heads": "n_head",
    "width": "n_embd",
}
# Settings of Hugging Face's configuration for which only these values are supported; their default first.
SUPPORTED: dict[str, tuple[object, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
}
HEAD = "lm_head.weight"
MASKS = (".attn.bias", ".attn.masked_bias")  # constants in old files, not parameters
Tensors = Mapping[str, torch.Tensor]


def hugging_face_name(name: str) -> str:
    """Return Hugging Face's name of a parameter: ``h.0.c_fc.bias`` is ``transformer.h.0.mlp.c_fc.bias``."""
    if name in ("wte", "wpe"):
        return f"{PREFIX}{name}.weight"
    return PREFIX + ".".join(MODULES.get(word, word) for word in name.split("."))


def _is_transposed(name: str) -> bool:
    return name.endswith(".weight") and any(f".{word}." in name for word in MODULES)


def to_hugging_face(tensors: Tensors, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Convert our tensors to Hugging Face's names and layout: views, except the linear weights."""
    converted = {}
    for name, tensor in tensors.items():
        tensor = tensor[: config.vocab_size] if name == "wte" else tensor
        converted[hugging_face_name(name)] = tensor.t().contiguous() if _is_transposed(name) else tensor
    return converted


def from_hugging_face(tensors: Tensors, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Convert Hugging Face's tensors to our names and layout; the token table is padded with zeros.

    Raises:
        WeftError: a tensor is missing, unknown or of another shape; the head is not the token table.
    """
    # Files of the inner model alone have names without the prefix.
    remaining = {n if n.startswith((PREFIX, HEAD)) else PREFIX + n: t for n, t in tensors.items()}
    remaining = {n: t for n, t in remaining.items() if not n.endswith(MASKS)}
    table, head = remaining.get(hugging_face_name("wte")), remaining.pop(HEAD, None)
    # Published files have the tied head once more; another head would be ignored silently.
    if head is not None and table is not None and not torch.equal(head, table):
        raise WeftError(HEAD, expected="the token table itself", got="other values")
    shapes = {n: p.shape for n, p in GPT(config, device="meta").named_parameters()}
    converted = {}
    for name, shape in shapes.items():
        tensor = remaining.pop(hugging_face_name(name), None)
        label = f"{MODEL}: {hugging_face_name(name)}"
        if tensor is None:
            raise WeftError(label, expected=tuple(shape), got="none")
        tensor = tensor.t().contiguous() if _is_transposed(name) else tensor
        expected = (config.vocab_size, config.width) if name == "wte" else tuple(shape)
        if tuple(tensor.shape) != expected:
            raise WeftError(label, expected=expected, got=tuple(tensor.shape))
        if name == "wte":
            # Rows of zeros: the loss and the logits leave them out.
            padding = config.padded_vocab - config.vocab_size
            tensor = torch.cat([tensor, tensor.new_zeros(padding, config.width)])
        converted[name] = tensor
    if remaining:
        raise WeftError(f"{MODEL}: tensors of a GPT-2", expected="no others", got=min(remaining))
    return converted


def read_config(folder: Path, **options: Any) -> ModelConfig:
    """Read the sizes from a folder's ``config.json``; ``options`` are ours: ``ops``, ``dropout``.

    Raises:
        WeftError: the file is missing or no JSON, or asks for something that :class:`GPT` does not compute.
    """
    try:
        data = read_json(folder / CONFIG)
        sizes = {ours: data[name] for ours, name in SIZES.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise WeftError(f"{folder / CONFIG}", expected="a GPT-2's configuration", got=got) from error
    config = ModelConfig(**sizes, **options)  # refuses sizes that are no numbers
    for name, supported in {**SUPPORTED, "n_inner": (None, 4 * config.width)}.items():
        # Old files leave out settings that had no alternative yet.
        value = data.get(name, supported[0])
        if value not in supported:
            expected = "none" if supported[0] is None else supported[0]
            raise WeftError(f"{folder / CONFIG}: {name}", expected=expected, got=value)
    return config


def load(folder: Path, **options: Any) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Read a Hugging Face folder: configuration, and tensors by our names, on the CPU, in their dtype.

    Raises:
        WeftError: :func:`read_config` or :func:`from_hugging_face` refuses it; it has no safetensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = read_config(folder, **options)
    try:
        tensors = load_file(folder / MODEL)
    except (OSError, SafetensorError) as error:
        hint = "transformers writes it: model.save_pretrained(folder); pickles are not read"
        got = f"{type(error).__name__}: {error}"
        raise WeftError(f"{folder / MODEL}", expected="safetensors", got=got, hint=hint) from error
    return config, from_hugging_face(tensors, config)


def save(folder: Path, config: ModelConfig, tensors: Tensors) -> None:
    """Write a folder that ``transformers.GPT2LMHeadModel.from_pretrained`` reads.

    ``tensors`` are a :class:`GPT`'s by our names, in the dtype to write. The weights are written to a
    temporary file and renamed, so that a folder never has half of them.

    Raises:
        WeftError: the folder cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    converted = {n: t.detach().contiguous() for n, t in to_hugging_face(tensors, config).items()}
    temporary = folder / f".{MODEL}.tmp"
    dtype = str(next(iter(converted.values())).dtype).removeprefix("torch.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(converted, temporary, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(_config_json(config, dtype), indent=2) + "\n")
        # The weights last: a reader that finds them finds the configuration too.
        os.replace(temporary, folder / MODEL)
    except (OSError, SafetensorError) as error:
        if temporary.exists():
            temporary.unlink()
        raise WeftError(f"{folder} cannot be written", got=str(error)) from error


def _config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    sizes = {name: getattr(config, ours) for ours, name in SIZES.items()}
    fixed = {name: supported[0] for name, supported in SUPPORTED.items()}
    end = config.vocab_size - 1  # <|endoftext|> is GPT-2's last token
    identity = {"architectures": ["GPT2LMHeadModel"], "bos_token_id": end, "eos_token_id": end}
    return {**identity, "dtype": dtype, **sizes, **fixed, **dropout, "initializer_range": 0.02}


def build(config: ModelConfig, tensors: Tensors, *, device: torch.device | str, dtype: torch.dtype) -> GPT:
    """Build a model from tensors by our names; no initial weights are generated."""
    # On meta: no memory is allocated and no random weights are computed before the assignment.
    model = GPT(config, device="meta", dtype=dtype)
    placed = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
    model.load_state_dict(placed, assign=True)
    return model


def read(
    path: Path, log: Callable[[str], None] = lambda line: None
) -> tuple[ModelConfig, str | None, dict[str, torch.Tensor]]:
    """Read a trained model of any kind: configuration, tokeniser's name, tensors by our names.

    Args:
        path: a run's directory, one of its checkpoints, or a Hugging Face folder, whose tokeniser's
            name is None.
        log: receives a line for each newer checkpoint of a run that is broken.

    Raises:
        WeftError: there is no model, or it cannot be read.
    """
    if not path.is_dir():
        raise WeftError(f"the checkpoint {path}", expected="a folder", got="none")
    if (path / CONFIG).is_file():
        config, tensors = load(path)
        return config, None, tensors
    return checkpoint.load_model(path, log)
