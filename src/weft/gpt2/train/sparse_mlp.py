"""``SparseMlp``: the MLPs' weights of a run are 2:4 sparse, in their rows and in their columns.

Each weight has a bool mask (out, in) that keeps at most two of each four elements in rows and in columns,
those of the largest magnitude. So the product of the forward and that of the gradient of x both run on
sparse tensor cores; the gradient of the weight is a dense product.

Without a refresh the mask is chosen once, from the weights that the run starts with. Pruned weights are set
to 0 and get no gradient: AdamW leaves them at 0. With a refresh all weights have gradients, as if the product
had been dense (the straight-through estimator), and every N steps the mask is chosen again.

A checkpoint has the weights that the model computes with, zeros included, in ``model.safetensors``: any
reader takes it for a dense model. The masks are in ``optimizer.safetensors``, and with a refresh also the
float32 weights with their pruned elements.

Source: Hubara et al., arXiv:2102.08124; the straight-through estimator: Bengio et al., arXiv:1308.3432.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft import ops
from weft.core import WeftError
from weft.gpt2.model.model import GPT, Block, WeightAndBias
from weft.gpt2.train.checkpoint_files import MODEL, OPTIMIZER, Tensors
from weft.gpt2.train.optimizer import Optimizer
from weft.nn.sparse import transposable_mask

MASK_PREFIX, UNPRUNED_PREFIX = "mask.", "unpruned."


class SparseMlp:
    """The sparse weights of a model that is about to be trained; chooses their masks and prunes them.

    Args:
        model: the model in the run's dtype, on its device.
        optimizer: has the float32 weights.
        refresh_every: steps between choices of the masks; None: the first ones stay.
    """

    def __init__(self, model: GPT, optimizer: Optimizer, refresh_every: int | None) -> None:
        self.optimizer, self.refresh_every = optimizer, refresh_every
        self.layers: dict[str, WeightAndBias] = {}
        for number, block in enumerate(model.h):
            assert isinstance(block, Block)
            self.layers[f"h.{number}.c_fc.weight"] = block.c_fc
            self.layers[f"h.{number}.mlp_proj.weight"] = block.mlp_proj
        for layer in self.layers.values():
            layer.mask = transposable_mask(layer.weight)
            layer.dense_gradient = refresh_every is not None
        self._prune()

    def masks(self) -> dict[str, torch.Tensor]:
        """Return the bool mask (out, in) of each sparse weight, by the weight's name."""
        return {name: mask for name, layer in self.layers.items() if (mask := layer.mask) is not None}

    @torch.no_grad()
    def _prune(self) -> None:
        """Set the pruned weights to 0; with a refresh they stay, because they can come back."""
        if self.refresh_every is None:
            masters = self.optimizer.masters()
            for name, mask in self.masks().items():
                # The model's weight is the master itself in float32.
                masters[name].mul_(mask)
                self.layers[name].weight.mul_(mask)

    def refresh(self, step: int) -> None:
        """Choose the masks again if it is due before the step after ``step`` completed ones."""
        if self.refresh_every is None or step == 0 or step % self.refresh_every:
            return
        for name, mask in self.masks().items():
            # In place: a captured graph reads the mask at this address.
            mask.copy_(transposable_mask(self.layers[name].weight))

    def checkpoint_files(self, rng: Tensors) -> dict[str, dict[str, torch.Tensor]]:
        """Return a checkpoint's tensors by file, with the states ``rng`` of the random generators."""
        masters, masks = self.optimizer.masters(), self.masks()
        sparse = {f"{MASK_PREFIX}{name}": mask for name, mask in masks.items()}
        if self.refresh_every is not None:
            sparse |= {f"{UNPRUNED_PREFIX}{name}": masters[name] for name in masks}
        weights = {name: w * masks[name] if name in masks else w for name, w in masters.items()}
        return {MODEL: weights, OPTIMIZER: {**self.optimizer.moments(), **rng, **sparse}}

    def restore(self, tensors: Mapping[str, dict[str, torch.Tensor]]) -> None:
        """Restore the masks of a checkpoint, and leave in ``tensors`` what a dense run's checkpoint has.

        Raises:
            WeftError: a mask is missing, or has another shape.
        """
        weights, others = tensors[MODEL], tensors[OPTIMIZER]
        for name, mask in self.masks().items():
            saved = others.pop(f"{MASK_PREFIX}{name}", None)
            if saved is None or saved.shape != mask.shape:
                got = "none" if saved is None else tuple(saved.shape)
                raise WeftError(f"the checkpoint's mask of {name}", expected=tuple(mask.shape), got=got)
            mask.copy_(saved)
            if self.refresh_every is not None:
                weights[name] = others.pop(f"{UNPRUNED_PREFIX}{name}")

    def summary(self) -> list[str]:
        """Return lines with the counts and bytes of the sparse weights."""
        total = n_kept = dense = 0
        sizes = torch.zeros(4, dtype=torch.int64)
        for layer in self.layers.values():
            weight, mask = layer.weight.detach(), layer.mask
            assert mask is not None
            total += weight.numel()
            n_kept += int(mask.sum())
            dense += weight.nbytes
            stored = ops.prune_2_4_transposable(weight * mask)
            sizes += torch.tensor([t.nbytes for t in stored])
        values, metadata, values_t, metadata_t = sizes.tolist()
        when = "once" if self.refresh_every is None else f"every {self.refresh_every} steps"
        return [
            f"sparse: {len(self.layers)} weights of the MLPs, 2:4 in rows and columns, chosen {when}; "
            f"{n_kept:,} of {total:,} elements stay ({100 * n_kept / total:.1f} %)",
            f"sparse: forward {values:,} bytes of values and {metadata:,} of metadata; transposed "
            f"{values_t:,} and {metadata_t:,}; dense {dense:,}",
        ]
