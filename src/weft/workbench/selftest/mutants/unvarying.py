"""Problems in other suites' formats whose constants, or whose generators, a candidate takes for granted.

A candidate leaves out weights that start as ones or zeros, ignores inputs that never vary, or stores the
answer to inputs that it expects again. Each is right at one set of weights and at one seed.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.workbench.selftest.mutants.mutant import Mutant, ProblemFiles

HEAD = "import random\nimport numpy as np\nimport torch, torch.nn as nn\nimport torch.nn.functional as F\n"
MODEL = """
class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, {arguments}):
        {forward}
"""
INPUTS = """
def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""
TASK = "tests:\n  - {size: 96, seed: 42}\nbenchmarks:\n  - {size: 4096, seed: 7}\n"
GPUMODE = """
def generate_input(size: int, seed: int):
    {data}

def ref_kernel(data):
    return {forward}

def check_implementation(data, output):
    ok = torch.allclose(output, ref_kernel(data), rtol=1e-4, atol=1e-4)
    return ok, "" if ok else "not close"
"""
X = "torch.randn(6, 64)"


def kernelbench(
    inputs: str,
    forward: str,
    candidate: str,
    *,
    init: str = "pass",
    own_init: str | None = None,
    arguments: str = "x",
    head: str = "",
    timed: bool = False,
) -> ProblemFiles:
    """Return a KernelBench problem: the bodies of ``forward``, and of ``__init__`` with the weights.

    ``own_init`` is the candidate's; without it the candidate has the reference's weights.
    """
    models = [
        MODEL.format(name=name, init=has, arguments=arguments, forward=body)
        for name, has, body in (
            ("Model", init, f"return {forward}"),
            ("ModelNew", init if own_init is None else own_init, candidate),
        )
    ]
    reference = HEAD + models[0] + INPUTS.format(inputs=inputs)
    return ProblemFiles(reference=reference, candidate=HEAD + head + models[1], timed=timed)


def gpumode(data: str, forward: str, candidate: str) -> ProblemFiles:
    """Return a GPU MODE problem: the generator's body, the reference's value and the candidate's file."""
    reference = HEAD + GPUMODE.format(data=data, forward=forward)
    return ProblemFiles(reference=reference, candidate=HEAD + candidate, task=TASK)


# -- weights that start as ones or zeros -----------------------------------------------------------

NORM = "self.norm = nn.LayerNorm(64)"
BATCH_NORM = "self.norm = nn.BatchNorm1d(64).eval()"
GAIN = "self.gain = nn.Parameter(torch.ones(64))"
LINEAR = "self.fc = nn.Linear(64, 32); nn.init.zeros_(self.fc.bias)"
WEIGHTS = {
    "norm-affine": (
        "a layer norm without its weight and bias",
        kernelbench(X, "self.norm(x)", "return F.layer_norm(x, (64,))", init=NORM),
    ),
    "norm-bias": (
        "a layer norm without its bias",
        kernelbench(X, "self.norm(x)", "return F.layer_norm(x, (64,), self.norm.weight)", init=NORM),
    ),
    "batch-statistics": (
        "a batch norm without its running mean and variance",
        kernelbench(
            X,
            "self.norm(x)",
            "return x * (1 + 1e-5) ** -0.5 * self.norm.weight + self.norm.bias",
            init=BATCH_NORM,
        ),
    ),
    "batch-variance": (
        "a batch norm without its running variance, and no weights of its own",
        kernelbench(X, "self.norm(x)", "return x * (1 + 1e-5) ** -0.5", init=BATCH_NORM, own_init="pass"),
    ),
    "gain-vector": (
        "an RMS norm without its gain of ones",
        kernelbench(X, "F.rms_norm(x, (64,), self.gain)", "return F.rms_norm(x, (64,))", init=GAIN),
    ),
    "gain-scalar": (
        "a residual branch without its gain of one element",
        kernelbench(
            X,
            "x + self.gain * torch.tanh(x)",
            "return x + torch.tanh(x)",
            init="self.gain = nn.Parameter(torch.ones(()))",
        ),
    ),
    "linear-bias": (
        "a linear layer without its bias of zeros",
        kernelbench(X, "self.fc(x)", "return x @ self.fc.weight.t()", init=LINEAR),
    ),
}

# -- inputs that never vary ------------------------------------------------------------------------

MASK = "torch.zeros(6, 64, dtype=torch.bool)"
SOFTMAX_OF_SCORES = "torch.softmax(x @ x.t() * 0.125 + mask, -1)"
STORED = "_stored = []\ndef custom_kernel(data):\n    {body}\n"
CONSTANTS = {
    "mask": (
        "ignores a mask that is always false",
        kernelbench(f"{X}, {MASK}", "x.masked_fill(mask, 0.0)", "return x.clone()", arguments="x, mask"),
    ),
    "additive-mask": (
        "ignores an additive mask of zeros",
        kernelbench(
            f"{X}, torch.zeros(6, 6)",
            SOFTMAX_OF_SCORES,
            f"return {SOFTMAX_OF_SCORES.replace(' + mask', '')}",
            arguments="x, mask",
        ),
    ),
    "scale": (
        "a number in place of a scale that is always the same",
        kernelbench(
            f"{X}, torch.full((64,), 0.5)",
            "torch.relu(x) * scale",
            "return 0.5 * torch.relu(x)",
            arguments="x, scale",
        ),
    ),
    "all-constant": (
        "a stored answer to inputs that are always ones",
        kernelbench(
            "torch.ones(6, 64)", "torch.softmax(x, 1)", "return torch.full((6, 64), 1 / 64, device=x.device)"
        ),
    ),
    "ignored-seed": (
        "a stored answer where the generator ignores its seed",
        gpumode(
            "return torch.randn(size, generator=torch.Generator().manual_seed(1))",
            "torch.sigmoid(data)",
            "def custom_kernel(data):\n"
            "    drawn = torch.randn(data.numel(), generator=torch.Generator().manual_seed(1))\n"
            "    return torch.sigmoid(drawn.to(data.device))\n",
        ),
    ),
}
UNVARIED = kernelbench(
    "torch.arange(384).view(6, 64)",
    "x * 2.5",
    "return torch.arange(384, device=x.device).view(6, 64) * 2.5",
    timed=True,
)

# -- generators other than torch's -----------------------------------------------------------------

# The first answer for ever: right where each process draws the same numbers at every seed.
FIRST = "self.kept = getattr(self, 'kept', None) if hasattr(self, 'kept') else torch.relu(x)\n"
FIRST += "        return self.kept.clone()"
GENERATORS = {
    "numpy": (
        "the first answer for ever, where numpy draws the inputs",
        kernelbench(
            "torch.from_numpy(np.random.standard_normal((6, 64)).astype(np.float32))",
            "torch.relu(x)",
            FIRST,
        ),
    ),
    "random": (
        "the first answer for ever, where Python's random draws the inputs",
        kernelbench(
            "torch.tensor([[random.gauss(0, 1) for _ in range(64)] for _ in range(6)])",
            "torch.relu(x)",
            FIRST,
        ),
    ),
    "numpy-in-a-task": (
        "a stored answer by the number of elements, where numpy draws the inputs of a task",
        gpumode(
            "np.random.seed(seed)\n    return torch.from_numpy(np.random.rand(size).astype(np.float32))",
            "data.square()",
            "_stored = {}\ndef custom_kernel(data):\n"
            "    return _stored.setdefault(data.numel(), data.square()).clone()\n",
        ),
    ),
}


def _rows() -> Iterator[Mutant]:
    for row, only, files in (
        ("W26", "weights", WEIGHTS),
        ("W26", "constants", CONSTANTS),
        ("W29", "seeds", GENERATORS),
    ):
        for name, (title, problem) in files.items():
            yield Mutant(
                id=f"{row}/{name.replace('-', '_')}/eager/{only}",
                operator=name.replace("-", "_"),
                title=title,
                killed_by=("error", "drift"),
                problem=problem,
                only=only,
            )
    yield Mutant(
        id="W26/integers/eager/untimed",
        operator="integers",
        title="a stored answer to integers that never vary",
        killed_by=("timed",),
        problem=UNVARIED,
        only="constants",
        phase="bench",
    )


MUTANTS = tuple(_rows())
