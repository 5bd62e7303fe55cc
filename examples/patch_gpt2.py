"""Patch a small random Hugging Face GPT-2: print the report, compare the logits, undo."""

from __future__ import annotations

import sys

import torch

import weft


def main() -> None:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        sys.exit("this example needs transformers: pip install 'weft[transformers]'")
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=64,
        vocab_size=257,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, config.vocab_size, (2, 48))
    before = model(ids).logits

    report = weft.patch(model)
    print(report)
    difference = (model(ids).logits - before).abs().max() / before.abs().max()
    print(f"\nlogits patched and unpatched differ by {difference:.1e} of the largest")

    # In training the logits need not be stored.
    report.undo()
    with weft.patch(model.train(), keep_logits=False):
        output = model(ids, labels=ids)
        output.loss.backward()
        print(f"loss {output.loss:.3f}, logits {output.logits}")
    print("undone, bit for bit:", torch.equal(model.eval()(ids).logits, before))


if __name__ == "__main__":
    main()
