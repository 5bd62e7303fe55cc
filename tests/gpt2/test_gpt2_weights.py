"""Hugging Face folders that Weft's GPT-2 cannot compute: each is refused with the difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weft import WeftError
from weft.gpt2.model import weights
from weft.gpt2.model.config import ModelConfig
from weft.gpt2.model.model import GPT

CONFIG = ModelConfig(vocab_size=131, block_size=32, layers=2, heads=4, width=64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("head", "lm_head.weight: expected the token table itself"),
        ("missing", "transformer.h.1.mlp.c_fc.weight: expected (256, 64), got none"),
        ("shape", "transformer.wpe.weight: expected (32, 64), got (31, 64)"),
        ("more", "no others, got transformer.h.7.ln_1.bias"),
        ("torn", "expected safetensors, got"),
        ("none", "pickles are not read"),
        ("activation", "activation_function: expected gelu_new, got relu"),
        ("inner", "n_inner: expected none, got 100"),
        ("sizes", "a GPT-2's configuration, got KeyError: 'n_head'"),
    ],
)
def test_folder_of_another_model_is_refused(tmp_path: Path, change: str, message: str) -> None:
    tensors = dict(GPT(CONFIG).named_parameters())
    file = tmp_path / weights.MODEL
    weights.save(tmp_path, CONFIG, tensors)
    data = load_file(file)
    config = json.loads((tmp_path / "config.json").read_text())
    if change == "head":
        data["lm_head.weight"] = data["transformer.wte.weight"] + 1
    elif change == "missing":
        del data["transformer.h.1.mlp.c_fc.weight"]
    elif change == "shape":
        data["transformer.wpe.weight"] = data["transformer.wpe.weight"][1:].contiguous()
    elif change == "more":
        data["transformer.h.7.ln_1.bias"] = torch.zeros(64)
    elif change == "activation":
        config["activation_function"] = "relu"
    elif change == "inner":
        config["n_inner"] = 100
    elif change == "sizes":
        del config["n_head"]
    save_file(data, file)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if change == "torn":
        file.write_bytes(file.read_bytes()[:-1000])
    elif change == "none":
        file.unlink()
    with pytest.raises(WeftError) as refused:
        weights.load(tmp_path)
    assert message in str(refused.value)


def test_unwritable_folder_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(WeftError, match="taken cannot be written"):
        weights.save(tmp_path / "taken", CONFIG, dict(GPT(CONFIG).named_parameters()))
