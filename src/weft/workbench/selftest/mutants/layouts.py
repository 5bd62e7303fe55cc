"""Outputs of problems in other suites' formats that are stored in another order than the reference's.

The checks of these suites compare values alone, so a permuted output is right, and gets no time. Every value
must be right all the same, and the memory must be the candidate's own, without gaps and overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.workbench.selftest.mutants.mutant import Mutant, ProblemFiles
from weft.workbench.selftest.mutants.unvarying import X, gpumode, kernelbench

DOUBLED, BY_COLUMNS = "x * 2", "(x.t().contiguous() * 2).t()"
ONE_BUFFER = """self.buffer = x.new_empty(64, 6) if self.buffer is None else self.buffer
        self.buffer.copy_((x * 2).t())
        return self.buffer.t()"""
WITH_GAPS = """y = x.new_empty(6, 128)[:, ::2]
        return y.copy_(x * 2)"""
CONTROLS: dict[str, tuple[str, ProblemFiles]] = {
    "by_columns": (
        "an output by columns where the reference's is by rows",
        kernelbench(X, DOUBLED, f"return {BY_COLUMNS}"),
    ),
    "channels_last": (
        "images with the channels last where the reference's come first",
        kernelbench(
            "torch.randn(2, 8, 5, 7)",
            "torch.relu(x) + 1",
            "return torch.relu(x.to(memory_format=torch.channels_last)) + 1",
        ),
    ),
    "task_by_columns": (
        "an output by columns, for a task",
        gpumode(
            "return torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))",
            "data * 2",
            f"def custom_kernel(x):\n    return {BY_COLUMNS}\n",
        ),
    ),
}
WRONG: dict[str, tuple[str, str, ProblemFiles]] = {
    "values": (
        "an output by columns with wrong values",
        "error drift",
        kernelbench(X, DOUBLED, f"return {BY_COLUMNS} * 1.01"),
    ),
    "order": (
        "the values by rows, described as by columns",
        "error drift",
        kernelbench(X, DOUBLED, "return (x * 2).view(64, 6).t()"),
    ),
    "expanded": (
        "an expanded output where the reference's has memory for each element",
        "layout",
        kernelbench(
            X,
            "x.mean(1, keepdim=True).expand(6, 64).contiguous()",
            "return x.mean(1, keepdim=True).expand(6, 64)",
        ),
    ),
    "gaps": (
        "an output in every other element of its memory",
        "layout",
        kernelbench(X, DOUBLED, WITH_GAPS),
    ),
    "alias": (
        "the input itself, described as by columns",
        "alias",
        kernelbench("torch.randn(24, 16)", "x.t().contiguous()", "return x.t()"),
    ),
    "one-buffer": (
        "one buffer by columns for all outputs",
        "kept",
        kernelbench(X, DOUBLED, ONE_BUFFER, own_init="self.buffer = None"),
    ),
    "lazy": (
        "an output by columns that is negated when it is read",
        "type",
        kernelbench(X, DOUBLED, "return torch._neg_view((x * -2).t().contiguous()).t()"),
    ),
}


def _mutants() -> Iterator[Mutant]:
    for name, (title, problem) in CONTROLS.items():
        yield Mutant(
            id=f"H12/{name}/eager/honest",
            operator=name,
            title=title,
            killed_by=(),
            problem=problem,
            honest=True,
        )
    for fault, (title, checks, problem) in WRONG.items():
        yield Mutant(
            id=f"W30/layout/eager/{fault}",
            operator="layout",
            title=title,
            killed_by=tuple(checks.split()),
            problem=problem,
        )


MUTANTS = tuple(_mutants())
