"""Text that a model goes on with, while it is trained."""

from __future__ import annotations

import torch

from weft.gpt2.model import GPT
from weft.gpt2.sampling import generate
from weft.gpt2.tokens import Tokeniser

PROMPT, TEMPERATURE, TOP_K = "\n", 0.8, 50


def sample(model: GPT, tokeniser: Tokeniser, count: int, seed: int) -> str:
    """``count`` tokens after a line's end, as text."""
    prompt = torch.from_numpy(tokeniser.encode(PROMPT).astype("int64"))[None]
    ids = generate(model, prompt, count, temperature=TEMPERATURE, top_k=TOP_K, seed=seed)
    return tokeniser.decode(ids.flatten().tolist())
