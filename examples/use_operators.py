"""Call Weft's operators as functions: differentiate, compile, and name an implementation."""

from __future__ import annotations

import torch

from weft import WeftError, ops


def main() -> None:
    x = torch.randn(64, 1024, requires_grad=True)

    # Differentiable like any torch function.
    ops.gelu(x).sum().backward()
    assert x.grad is not None
    print(f"gelu: mean gradient {x.grad.mean():.3f}")

    # Traceable: torch.compile sees no graph break.
    attend = torch.compile(lambda scores: ops.softmax(scores), fullgraph=True)
    rows = attend(x.detach()).sum(-1)
    print(f"softmax, compiled: rows sum to 1 within {(rows - 1).abs().max():.1e}")

    # Name an implementation. One that cannot run here raises an error with the reason before any launch.
    for name in ("eager", "torch", "triton", "cuda"):
        try:
            total = ops.sum(x.detach(), impl=name)
        except WeftError as error:
            print(f"sum, {name}: {error}")
        else:
            print(f"sum, {name}: {total:.4f}")

    # Invalid arguments raise one clear error.
    try:
        ops.matmul(torch.ones(2, 3), torch.ones(4, 5))
    except WeftError as error:
        print(f"matmul: {error}")


if __name__ == "__main__":
    main()
