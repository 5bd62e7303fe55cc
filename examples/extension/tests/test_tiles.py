"""Tests on a GPU: the operators against PyTorch's, at sizes that are no multiple of a block or a tile.

Before each call PyTorch's cache of freed memory is filled with NaN, so that an element that a kernel
does not write is detected.
"""

from __future__ import annotations

import pytest
import tiles
import torch

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: none is visible here")
SHAPES = [(1, 17), (17, 17), (17, 1000), (1000, 17), (1000, 1000), (1, 1), (0, 5), (5, 0)]
PRODUCTS = [(1, 1, 1), (17, 17, 17), (64, 128, 64), (65, 129, 63), (1000, 17, 1000), (3, 0, 5)]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def poison(numel: int) -> None:
    """Fill the memory of the next output of this size with NaN."""
    freed = [torch.full((max(numel, 1),), float("nan"), device="cuda") for _ in range(4)]
    del freed


@gpu
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [0, 1, 3, 4, 17, 1000, 1023, 1_000_003])
def test_relu(n: int, offset: int) -> None:
    x = normal(n + offset)[offset:]  # offset 1, 2, 3: not aligned to 16 bytes
    poison(n)
    assert torch.equal(tiles.relu(x), torch.relu(x))


@gpu
def test_relu_keeps_nan() -> None:
    x = torch.tensor([float("nan"), -1.0, float("inf"), -float("inf"), 2.0], device="cuda")
    assert torch.equal(tiles.relu(x).nan_to_num(7.0), torch.relu(x).nan_to_num(7.0))


@gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_add(shape: tuple[int, int]) -> None:
    a, b = normal(*shape), normal(*shape)
    poison(a.numel())
    assert torch.equal(tiles.add(a, b), a + b)


@gpu
def test_add_takes_any_strides() -> None:
    a, b = normal(1000, 17).t(), normal(17, 1).expand(17, 1000)
    poison(17000)
    assert torch.equal(tiles.add(a, b), a + b)


@gpu
@pytest.mark.parametrize(("rows", "inner", "columns"), PRODUCTS)
def test_matmul(rows: int, inner: int, columns: int) -> None:
    a, b = normal(rows, inner), normal(inner, columns)
    poison(rows * columns)
    exact = a.double() @ b.double()
    # A sum of n rounded products is off by at most n * 2^-24 of the sum of their magnitudes.
    bound = a.double().abs() @ b.double().abs() * (max(inner, 1) * 2.0**-24)
    assert ((tiles.matmul(a, b) - exact).abs() <= bound).all()


@gpu
@pytest.mark.parametrize("operator", ["relu", "add", "matmul"])
def test_opcheck(operator: str) -> None:
    """Run PyTorch's own check of schema, gradients, fake tensors and tracing."""
    shapes = {"relu": [(17, 5)], "add": [(17, 5), (17, 5)], "matmul": [(17, 5), (5, 9)]}[operator]
    inputs = tuple(normal(*shape).requires_grad_() for shape in shapes)
    torch.library.opcheck(getattr(torch.ops.tiles, operator).default, inputs)


@gpu
def test_gradients() -> None:
    inputs = [normal(17, 100).requires_grad_(), normal(17, 100).requires_grad_()]
    inputs.append(normal(100, 9).requires_grad_())
    references = [x.detach().clone().requires_grad_() for x in inputs]
    weight = normal(17, 9)
    tiles.matmul(tiles.relu(tiles.add(*inputs[:2])), inputs[2]).mul(weight).sum().backward()
    (torch.relu(references[0] + references[1]) @ references[2]).mul(weight).sum().backward()
    for x, reference in zip(inputs, references, strict=True):
        torch.testing.assert_close(x.grad, reference.grad, rtol=1e-4, atol=1e-4)


@gpu
def test_the_current_stream_is_used() -> None:
    x = torch.zeros(100_000, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the ones are written late; a call on another stream would read 0
        x.fill_(1.0)
        y = tiles.relu(x)
    stream.synchronize()
    assert (y == 1).all()


@gpu
def test_compiles_in_one_graph() -> None:
    x, w = normal(17, 100), normal(100, 9)
    run = torch.compile(lambda x, w: tiles.matmul(tiles.relu(x), w) * 2, fullgraph=True)
    torch.testing.assert_close(run(x, w), tiles.matmul(tiles.relu(x), w) * 2)


@gpu
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (lambda: (normal(4, 4).double(), normal(4, 4)), "a must be float32, got Double"),
        (lambda: (normal(4, 4).t()[1:], normal(4, 4)), "a must be contiguous"),
        (lambda: (normal(4), normal(4, 4)), "a must have 2 dimensions, got 1"),
        (lambda: (normal(4, 5), normal(4, 5)), "as many as b's rows, got 5 and 4"),
    ],
)
def test_invalid_arguments_are_refused(inputs: object, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        tiles.matmul(*inputs())


def test_a_cpu_tensor_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"x must be on a CUDA device; move it with x.cuda\(\)"):
        tiles.relu(torch.ones(3))
