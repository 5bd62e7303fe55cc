"""Honest candidates for problems in other suites' formats: unusual, right, and sometimes fast.

They keep pools, workspaces and packed weights between calls, return other containers than the
reference, draw inputs with other generators, and compute in other orders.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.workbench.selftest.mutants.mutant import Mutant, ProblemFiles
from weft.workbench.selftest.mutants.unvarying import NORM, X, gpumode, kernelbench

NJIT = """
import numba
@numba.njit(parallel=True)
def relu_rows(x, y):
    for i in numba.prange(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = max(x[i, j], np.float32(0))
"""
POOL = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)
"""
PAIR = "from collections import namedtuple\nPair = namedtuple('Pair', 'low high')\n"
COMPILED = "\n@torch.compile\ndef whole(x):\n    return torch.softmax(x * 2, -1) + 1\n"
# Packed at the first call, and again once other weights were loaded: setup() says so.
LINEAR = "self.fc = nn.Linear(64, 32)"
PACKED = "self.fc, self.packed = nn.Linear(64, 32), None"
PACKED_FORWARD = """if self.packed is None:
            self.packed = self.fc.weight.t().contiguous()
        return torch.addmm(self.fc.bias, x, self.packed)

    def setup(self):
        self.packed = None"""
WORKSPACE = """if self.buffer is None or self.buffer.shape != x.shape:
            self.buffer = torch.empty_like(x)
        torch.mul(x, 2.0, out=self.buffer)
        self.buffer.add_(1.0)
        return torch.relu(self.buffer)"""
BUFFERED = "self.norm = nn.LayerNorm(64); self.register_buffer('table', torch.linspace(0, 1, 64))"
CONTROLS: dict[str, tuple[str, str, ProblemFiles]] = {
    "compiled": (
        "compile",
        "torch.compile",
        kernelbench(X, "torch.softmax(x * 2, -1) + 1", "return whole(x)", head=COMPILED),
    ),
    "numba": (
        "eager",
        "a parallel loop of numba",
        kernelbench(
            X,
            "torch.relu(x)",
            "y = torch.empty_like(x, device='cpu')\n"
            "        relu_rows(x.cpu().numpy(), y.numpy())\n"
            "        return y.to(x.device)",
            head=NJIT,
        ),
    ),
    "pool": (
        "eager",
        "a thread pool of its own that is kept, timed",
        kernelbench(
            "torch.randn(64, 2048)",
            "torch.tanh(x)",
            "y = torch.empty_like(x)\n"
            "        pairs = zip(x.chunk(2), y.chunk(2))\n"
            "        list(pool.map(lambda p: torch.tanh(p[0], out=p[1]), pairs))\n"
            "        return y",
            head=POOL,
            timed=True,
        ),
    ),
    "drawn_by_numpy": (
        "eager",
        "inputs and weights that numpy draws",
        kernelbench(
            "torch.from_numpy(np.random.rand(6, 64).astype(np.float32))",
            "x * self.scale",
            "return self.scale * x",
            init="self.scale = nn.Parameter(torch.from_numpy(np.random.rand(64).astype(np.float32)))",
        ),
    ),
    "drawn_by_random": (
        "eager",
        "inputs that Python's random draws",
        kernelbench(
            "torch.tensor([[random.random() for _ in range(64)] for _ in range(6)])",
            "x.square().sum(1)",
            "return torch.einsum('ij,ij->i', x, x)",
        ),
    ),
    "transposed": (
        "eager",
        "a non-contiguous output where the reference's is",
        kernelbench(X, "(x * 2).t()", "return x.add(x).t()"),
    ),
    "expanded": (
        "eager",
        "an expanded output where the reference's is",
        kernelbench(
            X, "x.mean(1, keepdim=True).expand(6, 64)", "return (x.sum(1, keepdim=True) / 64).expand_as(x)"
        ),
    ),
    "dictionary": (
        "eager",
        "a dictionary in another order",
        kernelbench(
            X,
            "{'low': x.amin(1), 'high': x.amax(1)}",
            "return {'high': x.amax(1), 'low': x.amin(1)}",
        ),
    ),
    "named_tuple": (
        "eager",
        "a named tuple in place of a tuple",
        kernelbench(X, "(x.amin(1), x.amax(1))", "return Pair(*torch.aminmax(x, dim=1))", head=PAIR),
    ),
    "workspace": (
        "eager",
        "scratch memory that is kept between calls",
        kernelbench(X, "torch.relu(x * 2 + 1)", WORKSPACE, own_init="self.buffer = None"),
    ),
    "packed_weights": (
        "eager",
        "weights packed at the first call and after each change",
        kernelbench(X, "self.fc(x)", PACKED_FORWARD, init=LINEAR, own_init=PACKED),
    ),
    "buffers": (
        "eager",
        "a module with a buffer",
        kernelbench(
            X, "self.norm(x) + self.table", "return torch.add(self.table, self.norm(x))", init=BUFFERED
        ),
    ),
    "renamed_weights": (
        "eager",
        "a norm whose weights have other names",
        kernelbench(
            X,
            "self.norm(x)",
            "return F.layer_norm(x, (64,), self.a, self.b)",
            init=NORM,
            own_init="self.a, self.b = nn.Parameter(torch.ones(64)), nn.Parameter(torch.zeros(64))",
        ),
    ),
    "chunked": (
        "eager",
        "rows in chunks of three",
        kernelbench(
            "torch.randn(7, 129)",
            "torch.softmax(x, 1)",
            "return torch.cat([torch.softmax(part, 1) for part in x.split(3)])",
        ),
    ),
    "other_order": (
        "eager",
        "a float32 product summed in blocks of K, where the reference's is bf16",
        kernelbench(
            "torch.randn(32, 192).bfloat16(), torch.randn(192, 16).bfloat16()",
            "a @ b",
            "parts = [p.float() @ q.float() for p, q in zip(a.split(64, 1), b.split(64, 0))]\n"
            "        return sum(reversed(parts)).bfloat16()",
            arguments="a, b",
        ),
    ),
    "task": (
        "eager",
        "a task whose inputs numpy draws, computed by numpy",
        gpumode(
            "np.random.seed(seed)\n    return torch.from_numpy(np.random.rand(size).astype(np.float32))",
            "data.square()",
            "def custom_kernel(data):\n"
            "    return torch.from_numpy(np.square(data.cpu().numpy())).to(data.device)\n",
        ),
    ),
}


def _controls() -> Iterator[Mutant]:
    for name, (backend, title, problem) in CONTROLS.items():
        yield Mutant(
            id=f"H10/{name}/{backend}/honest",
            operator=name,
            title=title,
            killed_by=(),
            problem=problem,
            phase="bench" if problem.timed else "check",
            honest=True,
            devices=("cpu",) if name == "pool" else ("cpu", "cuda"),
            not_here="each thread has a current stream of its own" if name == "pool" else "",
        )


MUTANTS = tuple(_controls())
