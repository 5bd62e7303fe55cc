"""Messages of a sandbox's channel arrive unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.workbench.calls.errors import SandboxDied
from weft.workbench.sandbox import device_memory, protocol
from weft.workbench.sandbox.process import FORGED, Limits, Sandbox

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


def test_one_element_of_stride_0_has_bytes_on_every_device() -> None:
    for shape in ((1,), (1, 1)):
        one = torch.full((), 7.0).expand(shape)
        assert one.contiguous().stride() == (0,) * len(shape)
        # The way of a GPU's tensor: `view` alone refuses such a stride.
        assert protocol._bytes_of(one.contiguous()).view(torch.float32).tolist() == [7.0]


def test_an_answer_that_does_not_fit_on_a_gpu_is_no_forgery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sandbox, "_reply_bytes", lambda *_: MIB)
    empty = torch.empty

    def out_of_memory(*sizes: object, **options: object) -> torch.Tensor:
        if options.get("device") == "cpu:0":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*sizes, **options)

    with Sandbox("helpers.sandbox_handlers:handlers", limits=Limits(seconds=20)) as worker:
        monkeypatch.setattr(torch, "empty", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            worker.request("echo", {}, [torch.ones(3)], device="cpu:0")
        assert worker.has_ended  # the rest of the answer is not read


def test_a_large_message_goes_both_ways_at_once(sandbox: Sandbox) -> None:
    sent = torch.arange(12 * MIB, dtype=torch.int32)  # more than any socket's buffer
    assert torch.equal(sandbox.request("echo", {}, [sent, sent]).tensors[1], sent)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("verb", ["last_bytes", "long_reply"])
def test_a_message_of_over_two_gib(sandbox: Sandbox, verb: str) -> None:
    """Send such a message, or receive one: each takes a CPU eight seconds."""
    size = (1 << 31) + 12345
    sent = torch.zeros(size if verb == "last_bytes" else 0, dtype=torch.uint8)
    sent[-5:] = 7
    reply = sandbox.request(verb, {"size": size}, [sent], seconds=100)
    [received] = reply.tensors
    assert received[-6:].tolist() == [0, 7, 7, 7, 7, 7]
    assert reply.payload["size"] == size and len(received) == (6 if verb == "last_bytes" else size)


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """A worker whose tensors stay in its memory, as a GPU's large ones do, on a CPU under another name."""
    monkeypatch.setattr(Sandbox, "_reply_bytes", lambda *_: MIB)
    with Sandbox("helpers.sandbox_handlers:handlers", limits=Limits(seconds=20)) as worker:
        yield worker


def test_a_tensor_that_stays_in_the_workers_memory_is_copied_and_released(
    in_memory: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def copy_into(target: torch.Tensor, exported: device_memory.ExportedMemory) -> None:
        asked.append(exported)
        target.fill_(7.0)

    monkeypatch.setattr(device_memory, "copy_into", copy_into)
    reply = in_memory.request("keep_in_memory", {}, [torch.ones(3), torch.zeros(2)], device="cpu:0")
    assert [t.tolist() for t in reply.tensors] == [[7.0, 7.0, 7.0], [7.0, 7.0]]
    assert [(len(e.handle), e.offset) for e in asked] == [(device_memory.HANDLE_BYTES, 5)] * 2
    assert in_memory.request("alive").payload == {"alive": [False, False]}


def test_a_tensor_whose_memory_cannot_be_opened_is_sent(
    in_memory: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_into(*_: object) -> None:
        raise device_memory.NotShared("not here")

    monkeypatch.setattr(device_memory, "copy_into", copy_into)
    for exported in (0, 1):  # the first request tries it, and the second one does not
        reply = in_memory.request("keep_in_memory", {}, [torch.ones(3)], device="cpu:0")
        assert reply.payload == {"exported": exported} and torch.equal(reply.tensors[0], torch.ones(3))
    assert in_memory.request("alive").payload == {"alive": [False]}


def test_a_worker_that_never_sends_what_cannot_be_opened_is_ended(
    in_memory: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_into(*_: object) -> None:
        raise device_memory.NotShared("not here")

    monkeypatch.setattr(device_memory, "copy_into", copy_into)
    with pytest.raises(SandboxDied, match=FORGED):
        in_memory.request("export_always", {}, [torch.ones(3)], device="cpu:0")


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
