"""Ten kernels in the FlashInfer Trace schema, each with workloads, a right and a wrong solution."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TraceProblem:
    """Parts of a definition: axes by name (None: variable), tensors as ``"M K float32"``.

    ``reference``, ``right`` and ``wrong`` are bodies of ``run`` that set the outputs as variables;
    ``axes_of`` are the workloads' axes and ``sources`` the inputs that are not random.
    """

    axes: dict[str, int | str | None]
    inputs: dict[str, str]
    outputs: dict[str, str]
    reference: str
    right: str
    wrong: str
    axes_of: list[dict[str, int]]
    sources: dict[str, Any] = field(default_factory=dict)
    custom: str = ""
    constraints: tuple[str, ...] = ()
    destination: bool = False


PROBLEMS = {
    "rmsnorm": TraceProblem(
        axes={"rows": None, "n": 96},
        inputs={"x": "rows n float32", "gain": "n float32", "eps": "float32"},
        outputs={"y": "rows n float32"},
        reference="y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain",
        right="y = torch.nn.functional.rms_norm(x, (96,), gain, eps)",
        wrong="y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 3e-4 + eps) * gain",
        axes_of=[{"rows": 7}, {"rows": 32}],
        sources={"eps": {"type": "scalar", "value": 1e-5}},
    ),
    "gemm": TraceProblem(
        axes={"m": None, "n": 48, "k": 64},
        inputs={"a": "m k float16", "b": "n k float16"},
        outputs={"c": "m n float16"},
        reference="c = torch.matmul(a, b.T)",
        right="c = (a.float() @ b.float().T).half()",
        wrong="c = torch.matmul(a, b.T) * 1.01",
        axes_of=[{"m": 16}],
        constraints=("k % 16 == 0", "n <= k"),
    ),
    "silu_mul": TraceProblem(
        axes={"rows": None, "n": 40, "wide": "2 * n"},
        inputs={"x": "rows wide float32"},
        outputs={"y": "rows n float32"},
        reference="y = torch.nn.functional.silu(x[:, :40]) * x[:, 40:]",
        right="a, b = x.chunk(2, 1)\ny.copy_(a * torch.sigmoid(a) * b)",
        wrong="a, b = x.chunk(2, 1)\ny.copy_(b * torch.sigmoid(b) * a)",
        axes_of=[{"rows": 9}, {"rows": 24}],
        destination=True,
    ),
    "softmax": TraceProblem(
        axes={"rows": None, "n": None},
        inputs={"x": "rows n float32"},
        outputs={"y": "rows n float32"},
        reference="y = torch.softmax(x, -1)",
        right="e = (x - x.amax(-1, keepdim=True)).exp()\ny = e / e.sum(-1, keepdim=True)",
        wrong="y = torch.zeros_like(x)",
        axes_of=[{"rows": 5, "n": 4096}],
    ),
    "layer_norm": TraceProblem(
        axes={"rows": None, "n": 64},
        inputs={"x": "rows n float32", "weight": "n float32", "bias": "n float32"},
        outputs={"y": "rows n float32", "mean": "rows float32", "rstd": "rows float32"},
        reference=(
            "mean = x.mean(-1)\nrstd = torch.rsqrt(x.var(-1, unbiased=False) + 1e-5)\n"
            "y = (x - mean[:, None]) * rstd[:, None] * weight + bias"
        ),
        right=(
            "m = x.mean(-1)\nmean.copy_(m)\nrstd.copy_(((x - m[:, None]).square().mean(-1) + 1e-5).rsqrt())\n"
            "y.copy_((x - m[:, None]) * rstd[:, None] * weight + bias)"
        ),
        wrong=(
            "m = x.mean(-1)\nmean.copy_(m)\nrstd.copy_((x.var(-1) + 1e-5).rsqrt())\n"
            "y.copy_((x - m[:, None]) * rstd[:, None] * weight + bias)"
        ),
        axes_of=[{"rows": 33}],
        destination=True,
    ),
    "rope": TraceProblem(
        axes={"tokens": None, "heads": 4, "d": 32, "half": "d // 2"},
        inputs={"q": "tokens heads d float32", "angle": "tokens half float32"},
        outputs={"out": "tokens heads d float32"},
        reference=(
            "c, s = angle.cos()[:, None], angle.sin()[:, None]\na, b = q[..., :16], q[..., 16:]\n"
            "out = torch.cat([a * c - b * s, b * c + a * s], -1)"
        ),
        right=(
            "z = torch.polar(torch.ones_like(angle), angle)[:, None]\n"
            "r = torch.complex(q[..., :16].contiguous(), q[..., 16:].contiguous()) * z\n"
            "out = torch.cat([r.real, r.imag], -1)"
        ),
        wrong=(
            "c, s = angle.cos()[:, None], angle.sin()[:, None]\na, b = q[..., :16], q[..., 16:]\n"
            "out = torch.cat([a * c + b * s, b * c - a * s], -1)"
        ),
        axes_of=[{"tokens": 6}, {"tokens": 17}],
    ),
    "gather": TraceProblem(
        axes={"tokens": None, "vocabulary": 50, "n": 24},
        inputs={"table": "vocabulary n float16", "ids": "tokens int64"},
        outputs={"out": "tokens n float16"},
        reference="out = table[ids]",
        right="out = torch.index_select(table, 0, ids)",
        wrong="out = table[(ids + 1).clamp(max=49)]",
        axes_of=[{"tokens": 11}],
        custom=(
            "def generate(axes, device):\n"
            "    table = torch.randn(axes['vocabulary'], axes['n'], device=device).half()\n"
            "    return {'table': table, 'ids': torch.randint(0, 50, (axes['tokens'],), device=device)}\n"
        ),
    ),
    "cross_entropy": TraceProblem(
        axes={"rows": None, "classes": 37},
        inputs={"logits": "rows classes float32", "target": "rows int64"},
        outputs={"loss": "rows float32"},
        reference="loss = torch.nn.functional.cross_entropy(logits, target, reduction='none')",
        right="loss = logits.logsumexp(-1) - logits.gather(1, target[:, None])[:, 0]",
        wrong="loss = logits.exp().sum(-1) - logits.gather(1, target[:, None])[:, 0]",
        axes_of=[{"rows": 19}],
        custom=(
            "def generate(axes, device):\n"
            "    shape = axes['rows'], axes['classes']\n"
            "    target = torch.randint(0, shape[1], shape[:1], device=device)\n"
            "    return {'logits': torch.randn(shape, device=device), 'target': target}\n"
        ),
    ),
    "add": TraceProblem(
        axes={"n": None},
        inputs={"a": "n float32", "b": "n float32", "flag": "bool"},
        outputs={"c": "n float32"},
        reference="c = a + b if flag else a - b",
        right="c = torch.add(a, b, alpha=1 if flag else -1)",
        wrong="c = a.half().float() + b if flag else a - b",
        axes_of=[{"n": 1000}],
        sources={"flag": {"type": "scalar", "value": True}},
    ),
    "batched_gemm": TraceProblem(
        axes={"batch": None, "m": 12, "n": 20, "k": 16},
        inputs={"a": "batch m k float32", "b": "batch k n float32"},
        outputs={"c": "batch m n float32"},
        reference="c = torch.bmm(a, b)",
        right="c = torch.einsum('bmk,bkn->bmn', a, b)",
        wrong="c = torch.bmm(a, b[:1].expand_as(b))",
        axes_of=[{"batch": 3}, {"batch": 8}],
    ),
}


def tensor(text: str) -> dict[str, Any]:
    """Return the schema's tensor of ``"M K float32"``; a dtype alone is a scalar."""
    *shape, dtype = text.split()
    return {"shape": shape or None, "dtype": dtype}


def axis(value: int | str | None) -> dict[str, Any]:
    if value is None:
        return {"type": "var"}
    if isinstance(value, int):
        return {"type": "const", "value": value}
    return {"type": "expr", "expression": value}


def function(arguments: list[str], body: str, returned: list[str]) -> str:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    end = f"    return {', '.join(returned)}\n" if returned else ""
    return f"import torch\ndef run({', '.join(arguments)}):\n{lines}{end}"


def definition(name: str) -> dict[str, Any]:
    problem = PROBLEMS[name]
    source = function(list(problem.inputs), problem.reference, list(problem.outputs))
    return {
        "name": name,
        "op_type": name,
        "axes": {n: axis(v) for n, v in problem.axes.items()},
        "inputs": {n: tensor(t) for n, t in problem.inputs.items()},
        "outputs": {n: tensor(t) for n, t in problem.outputs.items()},
        "reference": source + problem.custom,
        **({"custom_inputs_entrypoint": "generate"} if problem.custom else {}),
        **({"constraints": list(problem.constraints)} if problem.constraints else {}),
    }


def workloads(name: str) -> list[dict[str, Any]]:
    problem = PROBLEMS[name]
    default = {"type": "custom" if problem.custom else "random"}
    inputs = {n: problem.sources.get(n, default) for n in problem.inputs}
    return [{"uuid": f"{name}-{n}", "axes": a, "inputs": inputs} for n, a in enumerate(problem.axes_of)]


def solution(name: str, body: str, **spec: Any) -> dict[str, Any]:
    problem = PROBLEMS[name]
    outputs = list(problem.outputs)
    arguments = [*problem.inputs, *(outputs if problem.destination else [])]
    return {
        "name": f"{name}_solution",
        "definition": name,
        "author": "tests",
        "spec": {
            "language": "python",
            "target_hardware": ["LOCAL"],
            "entry_point": "main.py::run",
            "dependencies": [],
            "destination_passing_style": problem.destination,
            **spec,
        },
        "sources": [
            {"path": "main.py", "content": function(arguments, body, [] if problem.destination else outputs)}
        ],
    }


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def write_problem(folder: Path, name: str) -> Path:
    """Write ``definition.json`` and ``workload.jsonl``; return the definition's path."""
    path = write_json(folder / "definition.json", definition(name))
    (folder / "workload.jsonl").write_text("".join(f"{json.dumps(w)}\n" for w in workloads(name)))
    return path
