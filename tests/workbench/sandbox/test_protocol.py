"""Messages of a sandbox's channel arrive unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.workbench.sandbox import protocol
from weft.workbench.sandbox.process import Limits, Sandbox

MIB = 1 << 20


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox("helpers.sandbox_handlers:handlers", limits=Limits(seconds=20)) as worker:
        yield worker


@pytest.mark.parametrize("name", protocol.DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7)], ids=str)
def test_every_dtype_arrives_bit_for_bit(sandbox: Sandbox, name: str, shape: tuple[int, ...]) -> None:
    dtype = protocol.DTYPES[name]
    count = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    raw = torch.arange(count, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    sent = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    [received] = sandbox.request("echo", {}, [sent]).tensors
    assert (received.dtype, received.shape, received.device.type) == (dtype, sent.shape, "cpu")
    assert bytes(protocol.byte_view(received)) == bytes(protocol.byte_view(sent))


@settings(max_examples=25)
@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=5), max_size=4),
    payload=st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text()),
    data=st.data(),
)
def test_shapes_strides_and_payloads_survive(
    sandbox: Sandbox, shapes: list[list[int]], payload: dict, data: st.DataObject
) -> None:
    sent = []
    for shape in shapes:
        tensor = torch.randn(shape)
        sent.append(tensor.permute(data.draw(st.permutations(range(len(shape))))))
    reply = sandbox.request("echo", payload, sent)
    assert reply.payload == payload
    assert all(t.is_contiguous() for t in reply.tensors)
    assert all(torch.equal(a, b) for a, b in zip(reply.tensors, sent, strict=True))


def test_a_view_is_sent_as_its_elements(sandbox: Sandbox) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    sent = [
        base[:, 1::2],
        base.T,
        torch.zeros(()).expand(3, 4),
        torch.view_as_complex(base.view(4, 3, 2)).conj(),
    ]
    for verb in ("echo", "transposed"):
        for one, received in zip(sent, sandbox.request(verb, {}, sent).tensors, strict=True):
            assert torch.equal(received, one if verb == "echo" else one.transpose(0, -1))


def test_a_large_message_goes_both_ways_at_once(sandbox: Sandbox) -> None:
    sent = torch.arange(12 * MIB, dtype=torch.int32)  # more than any socket's buffer
    assert torch.equal(sandbox.request("echo", {}, [sent, sent]).tensors[1], sent)


@pytest.mark.slow
def test_a_message_of_over_two_gib(sandbox: Sandbox) -> None:
    sent = torch.zeros((1 << 31) + 12345, dtype=torch.uint8)
    sent[-5:] = 7
    [received] = sandbox.request("echo", {}, [sent], seconds=100).tensors
    assert received.shape == sent.shape
    assert received[-6:].tolist() == [0, 7, 7, 7, 7, 7]


@given(limit=st.integers(2, 60), parts=st.lists(st.binary(max_size=40), max_size=10))
def test_a_long_output_is_shortened_to_its_two_ends(limit: int, parts: list[bytes]) -> None:
    tail, whole = protocol.OutputTail(limit), b"".join(parts)
    for part in parts:
        tail.add(part)
    text = tail.text()
    half = limit // 2
    if len(whole) <= 2 * half:
        assert text == whole.decode(errors="replace")
    else:
        first, last = whole[:half].decode(errors="replace"), whole[-half:].decode(errors="replace")
        assert text == f"{first}\n... {len(whole) - 2 * half} bytes left out ...\n{last}"
