"""The registry: operators and implementations by name, as strings, imported only when asked for.

Adding an implementation is one file and one line here. A target is ``module`` (its attribute
``IMPLEMENTATION`` is meant) or ``module:ATTRIBUTE``, relative to ``weft.ops.<operator>``.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from weft.core.implementation import Implementation
from weft.core.operator import Operator, unknown_name

SIX = {
    "eager": "with_eager",
    "torch": "with_torch",
    "compile": "with_eager:COMPILED",
    "triton": "with_triton",
    "cuda": "with_cuda",
    "numba": "with_numba",
    "numba/parallel": "with_numba:PARALLEL",
}

FIVE = {name: target for name, target in SIX.items() if not name.startswith("numba")}

REGISTRY: dict[str, dict[str, str]] = {
    "gelu": {**SIX},
    "softmax": {
        **SIX,
        "cuda/01-three-passes": "ladder:THREE_PASSES",
        "cuda/02-shared-reduction": "ladder:SHARED",
        "cuda/03-warp-per-row": "ladder:WARP",
        "cuda/04-online-registers": "ladder:ONLINE",
        "cuda/05-long-rows": "ladder:LONG",
    },
    "sum": {
        **SIX,
        "cuda/01-global-atomics": "ladder.steps:GLOBAL_ATOMICS",
        "cuda/02-shared-tree": "ladder.steps:SHARED_TREE",
        "cuda/03-dynamic-shared": "ladder.steps:DYNAMIC_SHARED",
        "cuda/04-warp-shuffle": "ladder.steps:WARP_SHUFFLE",
        "cuda/05-vectorised-grid-stride": "ladder.steps:VECTORISED_GRID_STRIDE",
    },
    "matmul": {**SIX, "compile": "with_compile"},
    "relu": {**FIVE, "cuda/01-scalar": "ladder:SCALAR"},
    "swiglu": {**FIVE},
    "cross_entropy": {**FIVE},
    "linear_cross_entropy": {**FIVE},
    "geglu": {**FIVE},
    "dropout": {name: FIVE[name] for name in ("eager", "triton", "cuda")},
    "bias_gelu": {**FIVE},
    "dropout_add_layer_norm": {name: FIVE[name] for name in ("eager", "triton", "cuda")},
    "layer_norm": {**FIVE},
    "rms_norm": {**FIVE},
    "add_layer_norm": {**FIVE},
    "add_rms_norm": {**FIVE},
    "embedding": {**FIVE},
    "adamw": {**FIVE},
    "linear": {**FIVE},
    "linear_gelu": {**FIVE},
    "linear_residual": {**FIVE},
    "attention": {
        "eager": "with_eager",
        "torch": "with_torch",
        "torch/flash": "with_torch:FLASH_ATTENTION",
        "torch/cudnn": "with_torch:CUDNN_ATTENTION",
        "torch/efficient": "with_torch:EFFICIENT",
        "compile": "with_eager:COMPILED",
        "triton": "with_triton",
        "cuda": "with_cuda",
        "triton/01-online": "ladder:ONLINE",
        "triton/02-tiled": "ladder:TILED",
    },
    "rope": {**FIVE},
}


# What `weft bench` takes where nothing is named: a look at every kind of work, in a minute.
FIRST_LOOK = ("gelu", "softmax", "sum", "matmul")


def operator_names() -> list[str]:
    return list(REGISTRY)


@cache
def operator(name: str) -> Operator:
    """The operator of this name; raises :class:`WeftError` with the near names."""
    if name not in REGISTRY:
        raise unknown_name("operator", name, operator_names())
    found = import_module(f"weft.ops.{name}.spec").OPERATOR
    assert isinstance(found, Operator)
    return found


def implementation_names(operator_name: str) -> list[str]:
    """The names of an operator's implementations, in the order they are shown."""
    if operator_name not in REGISTRY:
        raise unknown_name("operator", operator_name, operator_names())
    return list(REGISTRY[operator_name])


@cache
def implementation(operator_name: str, name: str) -> Implementation:
    """One implementation; raises :class:`WeftError` with the near names."""
    names = implementation_names(operator_name)
    if name not in names:
        raise unknown_name(f"implementation of {operator_name}", name, names)
    module, _, attribute = REGISTRY[operator_name][name].partition(":")
    loaded = import_module(f"weft.ops.{operator_name}.{module}")
    found = getattr(loaded, attribute or "IMPLEMENTATION")
    assert isinstance(found, Implementation)
    assert (found.operator, found.name) == (operator_name, name), f"{module} calls itself otherwise"
    return found


def implementations(operator_name: str) -> list[Implementation]:
    """All implementations of an operator, in the order they are shown."""
    return [implementation(operator_name, n) for n in implementation_names(operator_name)]
