"""``Pass``: forward and backward of a micro-batch; on a GPU, one CUDA graph of all its kernels.

A step of the 124M is some 700 launches. Python makes one in 30 to 100 us, and where a kernel takes
less than that the device waits: a small batch's always, a large one's at the beginning of each
step. A graph is launched at once, with the kernels and so the bits that it was made of.

Source: CUDA graphs for whole passes, as in PyTorch's notes on CUDA semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

WARM = 3  # micro-batches that are launched one by one: kernels are compiled and loaded by them


class Pass:
    """The loss of a micro-batch and, in the parameters, its gradients, which replace what was.

    Args:
        forward: (x, y, **draw) -> the mean loss; x and y of the same shapes each time.
        parameters: those that get gradients.
        parts: the micro-batches of a step: loss and gradients are divided by them.
        graph: whether a graph may be made of it: the kernels' work must hang on no number of the
            host's but what ``draw`` gives, with which there is none.
    """

    def __init__(
        self,
        forward: Callable[..., torch.Tensor],
        parameters: list[torch.nn.Parameter],
        parts: int,
        graph: bool,
    ) -> None:
        self.forward, self.parameters, self.parts = forward, parameters, parts
        self.wanted, self.taken = graph, 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, x: torch.Tensor, y: torch.Tensor, draw: Mapping[str, int]) -> torch.Tensor:
        """The loss as this part of the step's has it, (), float32; valid until the next call."""
        self.taken += 1
        if not self.wanted or draw or self.taken <= WARM:
            return self._run(x, y, draw)
        if self._graph is None:
            self._capture(x, y)
        assert self._graph is not None
        self._x.copy_(x)
        self._y.copy_(y)
        self._graph.replay()
        for p, gradient in zip(self.parameters, self._gradients, strict=True):
            p.grad = gradient
        return self._loss

    def _run(self, x: torch.Tensor, y: torch.Tensor, draw: Mapping[str, int]) -> torch.Tensor:
        loss = self.forward(x, y, **draw)
        (loss / self.parts).backward()
        return loss.detach().float() / self.parts

    def _capture(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._x, self._y = x.clone(), y.clone()
        for p in self.parameters:
            p.grad = None  # else the graph would add to it
        torch.cuda.empty_cache()  # the graph has memory of its own, as much again
        graph = torch.cuda.CUDAGraph()
        # The thread that makes batches may pin memory meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._loss = self._run(self._x, self._y, {})
        self._gradients = [p.grad for p in self.parameters]
        self._graph = graph
