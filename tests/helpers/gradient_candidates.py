"""KernelBench problems, and candidates whose gradients are right or wrong in a named way."""

from __future__ import annotations

HEAD = """
import torch, torch.nn as nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
"""
SCALE_INIT = """
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n))
        self.bias = nn.Parameter(torch.randn(n))
"""
WEIGHT_INIT = """
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, n) / n**0.5)
"""
GAIN_INIT = """
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(n) + 0.5)
"""

# By name: initial arguments, inputs, __init__, parameters of forward, the expression of its output.
PROBLEMS = {
    "scale": ("[48]", "torch.randn(32, 48)", SCALE_INIT, "x", "x * self.weight + self.bias"),
    "linear": ("[40]", "torch.randn(24, 40)", WEIGHT_INIT, "x", "x @ self.weight"),
    "rms": (
        "[64]",
        "torch.randn(16, 64)",
        GAIN_INIT,
        "x",
        "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight",
    ),
    "gain": ("[16]", "torch.randn(4, 8, 16)", GAIN_INIT, "x", "x * self.weight"),
    "softmax": ("[]", "torch.randn(16, 50)", "", "x", "torch.softmax(x, -1)"),
    "mul": ("[]", "torch.randn(20, 30), torch.randn(20, 30)", "", "a, b", "a * b"),
    "add": ("[]", "torch.randn(20, 30), torch.randn(20, 30)", "", "a, b", "a + b"),
    "maximum": (
        "[]",
        "torch.randint(0, 3, (20, 30)).float(), torch.randint(0, 3, (20, 30)).float()",
        "",
        "a, b",
        "torch.maximum(a, b)",
    ),
    "dropout": ("[]", "torch.randn(20, 30)", "", "x", "nn.functional.dropout(x.sin(), 0.3, True)"),
    "gather": (
        "[40]",
        "torch.randint(0, 40, (9, 7))",
        WEIGHT_INIT,
        "index",
        "nn.functional.embedding(index, self.weight)",
    ),
}


def problem(name: str) -> str:
    """Return the source of a problem's reference file."""
    arguments, inputs, init, parameters, output = PROBLEMS[name]
    return (
        f"{HEAD}class Model(nn.Module):{init}\n"
        f"    def forward(self, {parameters}):\n        return {output}\n"
        f"def get_inputs():\n    return [{inputs}]\ndef get_init_inputs():\n    return {arguments}\n"
    )


def plain(name: str, output: str = "", init: str = "") -> str:
    """Return a candidate that autograd differentiates; ``output`` replaces the reference's."""
    _, _, own_init, parameters, own_output = PROBLEMS[name]
    return (
        f"{HEAD}class ModelNew(nn.Module):{init or own_init}\n    def forward(self, {parameters}):\n"
        f"        return {output or own_output}\n"
    )


def custom(name: str, forward: str, backward: str, saved: str = "") -> str:
    """Return a candidate whose backward is written by hand.

    The function's arguments are the forward's, then the model's parameters. ``forward`` is the
    expression of the output ``y``, ``saved`` the tensors that the backward gets, by default all
    arguments, and ``backward`` a body that returns a gradient for each argument; ``g`` is incoming.
    """
    _, _, init, parameters, _ = PROBLEMS[name]
    weights = {SCALE_INIT: ["weight", "bias"], WEIGHT_INIT: ["weight"], GAIN_INIT: ["weight"]}.get(init, [])
    arguments = ", ".join([parameters, *weights])
    call = ", ".join([parameters, *(f"self.{w}" for w in weights)])
    saved = saved or arguments
    body = "\n".join(f"        {line}" for line in backward.splitlines())
    return f"""{HEAD}
STATE = {{}}
class F(Function):
    @staticmethod
    def forward(ctx, {arguments}):
        y = {forward}
        ctx.save_for_backward({saved})
        return y
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        {saved}, = ctx.saved_tensors
{body}
class ModelNew(nn.Module):{init}
    def forward(self, {parameters}):
        return F.apply({call})
"""


SCALE, RMS = "x * weight + bias", "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight"
RMS_GRADIENT = """r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
n = x * r
gw = g * weight
"""
TIES = "half = (a == b) * 0.5\nreturn g * ((a > b) + half), g * ((b > a) + half)"

RIGHT = {
    "scale by autograd": ("scale", plain("scale")),
    "scale by hand": ("scale", custom("scale", SCALE, "return g * weight, (g * x).sum(0), g.sum(0)")),
    "linear by autograd, as einsum": ("linear", plain("linear", "torch.einsum('bi,ij->bj', x, self.weight)")),
    "linear by hand": ("linear", custom("linear", "x @ weight", "return g @ weight.t(), (g.t() @ x).t()")),
    "linear with a parameter of another name": (
        "linear",
        plain("linear", "x @ self.w", WEIGHT_INIT.replace("self.weight", "self.w")),
    ),
    "rms by hand": (
        "rms",
        custom(
            "rms",
            RMS,
            RMS_GRADIENT + "return r * (gw - n * (gw * n).mean(-1, keepdim=True)), (g * n).sum(0)",
        ),
    ),
    "gain by hand": ("gain", custom("gain", "x * weight", "return g * weight, (g * x).sum((0, 1))")),
    "softmax by hand, from its output": (
        "softmax",
        custom("softmax", "torch.softmax(x, -1)", "return y * (g - (y * g).sum(-1, keepdim=True))", "y"),
    ),
    "maximum by hand, ties halved": ("maximum", custom("maximum", "torch.maximum(a, b)", TIES)),
    "add, whose gradients are the incoming one": ("add", plain("add")),
    "dropout with the reference's random numbers": ("dropout", plain("dropout")),
    "gather by hand": (
        "gather",
        custom(
            "gather",
            "weight[index]",
            "out = torch.zeros_like(weight)\n"
            "return None, out.index_add_(0, index.reshape(-1), g.reshape(-1, weight.shape[1]))",
        ),
    ),
}

# The check that refuses each, and a part of its reason: the gradient at fault.
WRONG = {
    "missing term": (
        "softmax",
        custom("softmax", "torch.softmax(x, -1)", "return y * g", "y"),
        "error: gradient of x",
    ),
    "wrong sign": (
        "scale",
        custom("scale", SCALE, "return g * weight, (g * x).sum(0), -g.sum(0)"),
        "error: gradient of parameter bias",
    ),
    "missing sum over batch": (
        "scale",
        custom("scale", SCALE, "return g * weight, (g * x)[0], g.sum(0)"),
        "error: gradient of parameter weight",
    ),
    "detached input": (
        "mul",
        plain("mul", "a.detach() * b"),
        "gradient: gradient of a is None, the reference's is not",
    ),
    "detached statistics": (
        "rms",
        plain("rms", PROBLEMS["rms"][4].replace("x.pow", "x.detach().pow")),
        "error: gradient of x",
    ),
    "wrong scale": (
        "scale",
        custom("scale", SCALE, "return g * weight, (g * x).mean(0), g.sum(0)"),
        "error: gradient of parameter weight",
    ),
    "gradient of another input": (
        "mul",
        custom("mul", "a * b", "return g * a, g * b"),
        "error: gradient of a",
    ),
    "accumulated twice": (
        "rms",
        custom(
            "rms",
            RMS,
            RMS_GRADIENT + "return r * (gw - n * (gw * n).mean(-1, keepdim=True)), 2 * (g * n).sum(0)",
        ),
        "error: gradient of parameter weight",
    ),
    "half precision lost": (
        "linear",
        custom(
            "linear",
            "x @ weight",
            "return (g.half() @ weight.half().t()).float(), x.t() @ g",
        ),
        "error: gradient of x",
    ),
    "zero at ties": (
        "maximum",
        custom("maximum", "torch.maximum(a, b)", "return g * (a > b), g * (b > a)"),
        "error: gradient of a",
    ),
    "missing broadcast reduce": (
        "gain",
        custom("gain", "x * weight", "return g * weight, (g * x).sum(0)[0]"),
        "error: gradient of parameter weight",
    ),
    "transposed": (
        "linear",
        custom("linear", "x @ weight", "return g @ weight.t(), g.t() @ x"),
        "error: gradient of parameter weight",
    ),
    "stale": (
        "mul",
        custom(
            "mul",
            "a * b",
            "if 'b' not in STATE: STATE['b'] = b.clone()\nreturn g * STATE['b'], g * a",
        ),
        "error: gradient of a",
    ),
    "no gradient function": (
        "softmax",
        plain("softmax", "torch.softmax(x.detach(), -1)"),
        "gradient: output 0 has no gradient function",
    ),
}
