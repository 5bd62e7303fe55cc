"""Liger's and quack's operators beside Weft's, checked and timed in the same run.

    pip install liger-kernel quack-kernels
    weft bench rms_norm --with examples/mine/peers.py

Each is called as its users call it, and goes through autograd. A package that is not installed, or that
needs a GPU, is *not run*, with the reason.
"""

from importlib import import_module
from importlib.util import find_spec

import torch

import weft
from weft.core import YES, Case, Support

PACKAGES = {"liger_kernel": "liger-kernel", "quack": "quack-kernels"}


def has(package: str):
    """Return the function that says whether a package's kernels can run a case here."""

    def supports(case: Case, device: str) -> Support:
        if find_spec(package) is None:
            return weft.no(f"needs {PACKAGES[package]}: pip install {PACKAGES[package]}")
        return YES if device == "cuda" else weft.no(f"{package} needs a GPU")

    return supports


def peer(operator: str, package: str):
    """Return the decorator that declares a function as a package's implementation of an operator."""
    name = PACKAGES[package].partition("-")[0]
    return weft.implementation(
        operator,
        backend="torch",
        name=f"torch/{name}",
        supports=has(package),
        deterministic=False,  # the packages do not promise it
        idea=f"{PACKAGES[package]}, as its users call it",
    )


@peer("layer_norm", "liger_kernel")
def liger_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float):
    function = import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    return function.apply(x, weight, bias, eps)


@peer("rms_norm", "liger_kernel")
def liger_rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float):
    function = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return function.apply(x, weight, eps, 0.0, "llama", False)  # False: do not overwrite dy with the gradient


@peer("swiglu", "liger_kernel")
def liger_swiglu(gate: torch.Tensor, up: torch.Tensor):
    return import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction.apply(gate, up)


@peer("geglu", "liger_kernel")
def liger_geglu(gate: torch.Tensor, up: torch.Tensor):
    return import_module("liger_kernel.ops.geglu").LigerGELUMulFunction.apply(gate, up)


@peer("rms_norm", "quack")
def quack_rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float):
    return import_module("quack").rmsnorm(x, weight, eps=eps)


@peer("softmax", "quack")
def quack_softmax(x: torch.Tensor):
    return import_module("quack").softmax(x)
