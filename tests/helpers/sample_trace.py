"""Trace as torch.profiler writes it, small enough to fold by hand: two steps, two threads, a GPU."""

from __future__ import annotations

from typing import Any

GELU = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluFunctor<float> >(int)"


def event(name: str, start: float, end: float, cat: str = "cpu_op", **fields: Any) -> dict[str, Any]:
    """Return a complete event from ``start`` to ``end`` us, by default on the main thread of the host."""
    tid = fields.pop("tid", 1)
    dur = end - start
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "ts": start,
        "dur": dur,
        "pid": 7,
        "tid": tid,
        **fields,
    }


def kernel(name: str, start: float, end: float, launch: int, stream: int = 7) -> dict[str, Any]:
    args = {"correlation": launch, "device": 0, "stream": stream}
    return event(name, start, end, "kernel", tid=stream, args=args) | {"pid": 0}


def launch(start: float, end: float, number: int, tid: int = 1) -> dict[str, Any]:
    args = {"correlation": number}
    return event("cudaLaunchKernel", start, end, "cuda_runtime", args=args, tid=tid)


# Two steps of 100 us with 10 between; the host launches, a second thread does the backward.
TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "thread_name", "pid": 7, "tid": 2, "args": {"name": "2 (autograd)"}},
        event("PyTorch Profiler (0)", 0, 9999, "Trace"),
        event("ProfilerStep#3", 1000, 1100, "user_annotation"),
        event("ProfilerStep#4", 1110, 1210, "user_annotation"),
        event("ProfilerStep#3", 1000, 1100, "gpu_user_annotation", tid=7),
        event("Stream Sync", 1090, 1100, "cuda_sync", tid=7),
        event("aten::linear", 1010, 1050),
        event("aten::mm", 1015, 1045),
        launch(1020, 1030, 1),
        event("aten::linear", 1110, 1150),
        event("aten::mm", 1115, 1145),
        launch(1120, 1130, 2),
        event("MulBackward0", 1160, 1180, tid=2),
        launch(1165, 1170, 3, tid=2),
        kernel("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", 1030, 1090, 1),
        kernel("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", 1130, 1190, 2),
        kernel(GELU, 1180, 1230, 3, stream=9),
        kernel("Memcpy DtoH (Device -> Pinned)", 1200, 1205, 99),
        {"ph": "i", "name": "[memory]", "pid": 7, "tid": 1, "ts": 1010},
    ]
}  # fmt: skip
