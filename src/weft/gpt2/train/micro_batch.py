"""``MicroBatch``: forward and backward of a micro-batch; on a GPU, one CUDA graph of all its kernels.

A step of the 124M has about 700 kernel launches. Python needs 30 to 100 us for one, and the device
idles where a kernel takes less: always with a small batch, and at the start of each step with a large
one. A graph is launched at once; it runs the same kernels and gives the same bits.

Source: CUDA graphs of whole passes, as in PyTorch's notes on CUDA semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from weft.machine.nvtx import annotate

WARMUP_CALLS = 3  # launched one by one, so that kernels are compiled and loaded before the capture


class MicroBatch:
    """Computes the loss of a micro-batch and its gradients, which replace those in the parameters.

    Args:
        forward: (x, y, **dropout) -> the mean loss; x and y have the same shapes in each call.
        parameters: the parameters that get gradients.
        accumulate: micro-batches of a step; loss and gradients are divided by this number.
        use_graph: capture a CUDA graph. The kernels must then depend on no number of the host except
            those in ``dropout``; a call with a dropout seed is launched without the graph.
    """

    def __init__(
        self,
        forward: Callable[..., torch.Tensor],
        parameters: list[torch.nn.Parameter],
        accumulate: int,
        use_graph: bool,
    ) -> None:
        self.forward, self.parameters, self.accumulate = forward, parameters, accumulate
        self.use_graph, self.calls = use_graph, 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def is_warm(self) -> bool:
        """False while a call may compile kernels or capture the graph: its time is not that of the next."""
        return self.calls > (WARMUP_CALLS if self.use_graph else 0)

    def __call__(self, x: torch.Tensor, y: torch.Tensor, dropout: Mapping[str, int]) -> torch.Tensor:
        """Return the loss divided by ``accumulate``, a float32 scalar, valid until the next call."""
        self.calls += 1
        # A dropout seed is a number of the host, which a graph would freeze: every replay would drop the same
        # elements.
        if not self.use_graph or dropout or self.calls <= WARMUP_CALLS:
            return self._forward_backward(x, y, dropout)
        if self._graph is None:
            self._capture(x, y)
        assert self._graph is not None
        # Asynchronous, on the stream that then replays the graph.
        self._x.copy_(x)
        self._y.copy_(y)
        with annotate("forward and backward"):  # one launch of one graph
            self._graph.replay()
        for p, gradient in zip(self.parameters, self._gradients, strict=True):
            # The optimizer drops the gradients after each step; the graph writes to the same tensors again.
            p.grad = gradient
        return self._loss

    def _forward_backward(self, x: torch.Tensor, y: torch.Tensor, dropout: Mapping[str, int]) -> torch.Tensor:
        with annotate("forward"):
            loss = self.forward(x, y, **dropout)
        with annotate("backward"):
            (loss / self.accumulate).backward()
        # Dividing before the sum keeps the sum of the micro-batches' losses the mean of the batch.
        return loss.detach().float() / self.accumulate

    def _capture(self, x: torch.Tensor, y: torch.Tensor) -> None:
        # The graph reads from fixed addresses; each call copies its batch there.
        self._x, self._y = x.clone(), y.clone()
        for p in self.parameters:
            p.grad = None  # else the captured backward would add to it
        torch.cuda.empty_cache()  # the graph has a memory pool of its own, of the same size
        graph = torch.cuda.CUDAGraph()
        # thread_local: the prefetch thread may pin memory during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._loss = self._forward_backward(self._x, self._y, {})
        self._gradients = [p.grad for p in self.parameters]
        self._graph = graph
