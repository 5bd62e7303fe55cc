"""Record of what torch.compile fuses: kernels and library calls that Inductor generates for small functions.

    python3 -m weft.lab.claims.inductor --save results/inductor/fusion.json

Inductor generates C++ for a CPU here; nothing is compiled or run. Its import takes seconds, which is why the
claim about it reads a record.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FUNCTIONS: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "a chain of elementwise operations": (lambda x: torch.relu(x * 2 + 1).tanh(), 1),
    "bias and GELU": (lambda x, b: torch.nn.functional.gelu(x + b[0], approximate="tanh"), 2),
    "softmax over rows": (lambda x: torch.softmax(x, -1), 1),
    "a product and ReLU": (lambda x, w: torch.relu(x @ w), 2),
    "attention as two products and softmax": (lambda q, k, v: torch.softmax(q @ k.t(), -1) @ v, 3),
}
SIDE = 64  # rows and columns of each argument


def generated_code(function: Callable[..., torch.Tensor], arguments: int) -> str:
    """Return the wrapper and the C++ kernels that Inductor generates for a function of square matrices."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()
    trace = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")
    module = trace(*(torch.empty(SIDE, SIDE) for _ in range(arguments)))
    graph = GraphLowering(module)
    with mode:
        inputs = [torch.empty(SIDE, SIDE) for _ in range(arguments)]
    with V.set_graph_handler(graph), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        graph.run(*inputs)
        code: Any = graph.codegen()
    return str(code[0].value)


def fusion() -> dict[str, dict[str, int]]:
    """Return for each function the number of generated kernels and of calls of library products."""
    counts = {}
    for name, (function, arguments) in FUNCTIONS.items():
        code = generated_code(function, arguments)
        counts[name] = {
            "kernels": code.count("async_compile.cpp_pybinding("),
            "library_calls": code.count("extern_kernels.mm(") + code.count("extern_kernels.addmm("),
        }
    return counts


def main(arguments: list[str] | None = None) -> int:
    """Print the record, or save it."""
    parser = argparse.ArgumentParser(prog="python3 -m weft.lab.claims.inductor", description=__doc__)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the record to this file")
    path = parser.parse_args(arguments).save
    text = json.dumps({"torch": torch.__version__, "functions": fusion()}, indent=1) + "\n"
    if path is None:
        print(text, end="")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
