"""Networks that are trained side by side: N multilayer perceptrons as stacked weights, with masks.

Shapes: N networks, B images in a batch, F features, C classes. Layer l has weights (N, in, out) and biases
(N, 1, out); a batch is (N, B, F). One product of stacks serves all networks, which is quicker on a CPU than
one network after another. The networks are independent: no operation mixes two of them.

A mask is a bool tensor like the weights, True where a weight is kept. Biases are never pruned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch.nn import functional

Masks = tuple[torch.Tensor, ...]
Batches = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
TEST_CHUNK = 500  # images that are classified at once


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State of N networks after ``step`` training steps: their parameters and the moments of Adam.

    Each field of tensors has the weights of all layers first, then their biases.
    """

    values: tuple[torch.Tensor, ...]
    means: tuple[torch.Tensor, ...]
    squares: tuple[torch.Tensor, ...]
    step: int

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        """Return the weights of each layer, (N, in, out)."""
        return self.values[: len(self.values) // 2]

    @property
    def networks(self) -> int:
        return len(self.values[0])

    def repeated(self, times: int) -> Snapshot:
        """Return ``times`` copies of the networks, one whole copy after another."""
        return joined([self] * times)


def joined(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Return the networks of all snapshots, which are at the same step, as one."""
    (step,) = {s.step for s in snapshots}

    def concatenated(field: str) -> tuple[torch.Tensor, ...]:
        stacks = zip(*(getattr(s, field) for s in snapshots), strict=True)
        return tuple(torch.cat(tensors) for tensors in stacks)

    fields = {field: concatenated(field) for field in ("values", "means", "squares")}
    return Snapshot(**fields, step=step)


def joined_masks(masks: Sequence[Masks]) -> Masks:
    """Return the masks of several stacks of networks as those of one."""
    return tuple(torch.cat(tensors) for tensors in zip(*masks, strict=True))


def initial(sizes: Sequence[int], seeds: Sequence[int]) -> Snapshot:
    """Return one network for each seed, with layers from ``sizes[i]`` to ``sizes[i + 1]`` features.

    Weights are normal with Glorot's deviation (Glorot and Bengio 2010), biases zero.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    weights, biases = [], []
    for inputs, outputs in pairwise(sizes):
        deviation = (2 / (inputs + outputs)) ** 0.5
        layers = [deviation * torch.randn(inputs, outputs, generator=g) for g in generators]
        weights.append(torch.stack(layers))
        biases.append(torch.zeros(len(seeds), 1, outputs))
    values = (*weights, *biases)
    zeros = tuple(torch.zeros_like(v) for v in values)
    return Snapshot(values=values, means=zeros, squares=zeros, step=0)


def masked(snapshot: Snapshot, masks: Masks) -> Snapshot:
    """Return the networks with every pruned weight set to zero."""
    weights = tuple(w * m for w, m in zip(snapshot.weights, masks, strict=True))
    return replace(snapshot, values=(*weights, *snapshot.values[len(masks) :]))


def logits(values: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return the logits (N, B, C) of a batch (N, B, F), with ReLU between the layers."""
    half = len(values) // 2
    for index, (weight, bias) in enumerate(zip(values[:half], values[half:], strict=True)):
        x = torch.baddbmm(bias, x, weight)
        if index < half - 1:
            x = torch.relu(x)
    return x


def train(
    snapshot: Snapshot,
    masks: Masks,
    batches: Batches,
    *,
    until: int,
    learning_rate: float,
    on_step: Callable[[int], None] = lambda step: None,
) -> Snapshot:
    """Train every network with Adam from the snapshot's step to step ``until``; leave the snapshot as it is.

    ``batches(step)`` returns images (N, B, F) and classes (N, B). Pruned weights are zero throughout.
    """
    start = masked(snapshot, masks)
    parameters = [v.clone().requires_grad_() for v in start.values]
    # Adam treats each element by itself, so that one optimizer of the stacks is one for each network.
    optimizer = torch.optim.Adam(parameters, lr=learning_rate, fused=True)
    for p, mean, square in zip(parameters, snapshot.means, snapshot.squares, strict=True):
        optimizer.state[p] = {
            "step": torch.tensor(float(snapshot.step)),
            "exp_avg": mean.clone(),
            "exp_avg_sq": square.clone(),
        }
    keep = [m.to(torch.float32) for m in masks]
    for step in range(snapshot.step, until):
        x, y = batches(step)
        # The sum over networks of each one's mean loss: the gradient of a network has no other in it.
        loss = functional.cross_entropy(logits(parameters, x).flatten(0, 1), y.flatten(), reduction="sum")
        gradients = torch.autograd.grad(loss / x.shape[1], parameters)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        optimizer.step()
        with torch.no_grad():
            # The moments of a pruned weight may move it; the product puts it back to zero.
            torch._foreach_mul_(parameters[: len(keep)], keep)
        on_step(step + 1)
    states = [optimizer.state[p] for p in parameters]
    return Snapshot(
        values=tuple(p.detach() for p in parameters),
        means=tuple(s["exp_avg"] for s in states),
        squares=tuple(s["exp_avg_sq"] for s in states),
        step=until,
    )


def accuracy(snapshot: Snapshot, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Return each network's share of correct classes, of images (count, F) with classes (count,)."""
    correct = torch.zeros(snapshot.networks, dtype=torch.int64)
    with torch.no_grad():
        for images, classes in zip(x.split(TEST_CHUNK), y.split(TEST_CHUNK), strict=True):
            guesses = logits(snapshot.values, images.expand(snapshot.networks, -1, -1)).argmax(-1)
            correct += (guesses == classes).sum(1)
    return [count / len(y) for count in correct.tolist()]


def pruned(weights: Sequence[torch.Tensor], masks: Masks, counts: Sequence[int]) -> Masks:
    """Return masks that keep the ``counts[l]`` largest magnitudes of layer l among those kept so far.

    Each network and layer has exactly that many weights afterwards, also where magnitudes are equal.
    """
    kept_masks = []
    for weight, mask, count in zip(weights, masks, counts, strict=True):
        # -1 sorts every weight that is pruned already below the kept ones, which may be zero.
        magnitude = torch.where(mask, weight.abs(), -1.0).flatten(1)
        order = magnitude.sort(dim=1, descending=True, stable=True).indices[:, :count]
        chosen = torch.zeros_like(magnitude, dtype=torch.bool).scatter_(1, order, True)
        kept_masks.append(chosen.view_as(mask))
    return tuple(kept_masks)


def random_masks(masks: Masks, seeds: Sequence[int]) -> Masks:
    """Return masks with as many weights in each layer as ``masks``, at random positions of every network."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    shuffled = []
    for mask in masks:
        layers = []
        for layer, generator in zip(mask, generators, strict=True):
            flat = layer.flatten()
            layers.append(flat[torch.randperm(len(flat), generator=generator)].view_as(layer))
        shuffled.append(torch.stack(layers))
    return tuple(shuffled)
