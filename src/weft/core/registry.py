"""The registry: operators and implementations by name, imported only when they are asked for.

Adding an implementation is one file and one line here. A target is ``module:ATTRIBUTE``, relative to the
package that holds the operator: ``weft.ops.softmax`` for an operator with a package of its own, a family
such as ``weft.ops.norms`` for operators that share their kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module

from weft.core.errors import WeftError
from weft.core.implementation import Implementation, without_suffix
from weft.core.operator import Operator, unknown_name

FIVE = ("eager", "torch", "compile", "triton", "cuda")
SIX = (*FIVE, "numba", "numba/parallel")
EAGER_TRITON_CUDA = ("eager", "triton", "cuda")


@dataclass(frozen=True)
class Entry:
    """Location of an operator: its package under ``weft.ops``, and the targets inside it."""

    package: str
    spec: str
    implementations: dict[str, str]


def _single(package: str, names: tuple[str, ...], **more: str) -> Entry:
    """An operator with a package of its own: ``with_<backend>.py`` defines ``IMPLEMENTATION``."""
    targets = {name: f"with_{name.partition('/')[0]}:IMPLEMENTATION" for name in names}
    # The compiled implementation is derived from the eager one and defined beside it.
    if "compile" in targets:
        targets["compile"] = "with_eager:COMPILED"
    if "numba/parallel" in targets:
        targets["numba/parallel"] = "with_numba:PARALLEL"
    return Entry(package, "spec:OPERATOR", targets | more)


def _member(family: str, operator_name: str, names: tuple[str, ...], **more: str) -> Entry:
    """A member of a family: ``with_<backend>.py`` defines one implementation for each member, by its name."""
    member = operator_name.upper()
    targets = {name: f"with_{name}:{member}" for name in names}
    if "compile" in targets:
        targets["compile"] = f"with_eager:{member}_COMPILED"
    return Entry(family, f"spec:{member}", targets | more)


REGISTRY: dict[str, Entry] = {
    "gelu": _member(
        "activations", "gelu", FIVE, **{"numba": "gelu_numba:CUDA", "numba/parallel": "gelu_numba:PARALLEL"}
    ),
    "softmax": _single(
        "softmax",
        SIX,
        **{
            "cuda/01-three-passes": "ladder:THREE_PASSES",
            "cuda/02-shared-reduction": "ladder:SHARED",
            "cuda/03-warp-per-row": "ladder:WARP",
            "cuda/04-online-registers": "ladder:ONLINE",
            "cuda/05-long-rows": "ladder:LONG",
        },
    ),
    "sum": _single(
        "sum",
        SIX,
        **{
            "cuda/01-global-atomics": "ladder.steps:GLOBAL_ATOMICS",
            "cuda/02-shared-tree": "ladder.steps:SHARED_TREE",
            "cuda/03-dynamic-shared": "ladder.steps:DYNAMIC_SHARED",
            "cuda/04-warp-shuffle": "ladder.steps:WARP_SHUFFLE",
            "cuda/05-vectorised-grid-stride": "ladder.steps:VECTORISED_GRID_STRIDE",
        },
    ),
    "matmul": _single(
        "matmul",
        SIX,
        **{
            "compile": "with_compile:IMPLEMENTATION",
            "cuda/01-naive": "ladder:NAIVE",
            "cuda/02-coalesced": "ladder:COALESCED",
            "cuda/03-shared-tile": "ladder:SHARED_TILE",
            "cuda/04-register-column": "ladder:REGISTER_COLUMN",
            "cuda/05-register-square": "ladder:REGISTER_SQUARE",
            "cuda/06-vectors": "ladder:VECTORS",
            "cuda/07-double-buffer": "ladder:DOUBLE_BUFFER",
            "cuda/08-conflict-free": "ladder:CONFLICT_FREE",
            "cuda/09-warp-tile": "ladder:WARP_TILE",
            "cuda/11-mma-sync": "ladder.half:MMA_SYNC",
            "cuda/12-wgmma": "ladder.half:WGMMA",
            "cuda/13-pipeline": "ladder.half:PIPELINE",
            "cuda/14-warp-roles": "ladder.half:WARP_ROLES",
            "cuda/15-two-consumers": "ladder.half:TWO_CONSUMERS",
            "cuda/16-persistent": "ladder.half:PERSISTENT",
            "cuda/17-tma-store": "ladder.half:TMA_STORE",
            "cuda/18-multicast": "ladder.half:MULTICAST_PAIR",
            "cuda/dynamic-tile-16": "with_cuda_dynamic:TILE_16",
            "cuda/dynamic-tile-32": "with_cuda_dynamic:TILE_32",
        },
    ),
    "scaled_matmul": _single("scaled_matmul", ("eager", "torch", "cuda")),
    "relu": _member("activations", "relu", FIVE, **{"cuda/01-scalar": "with_cuda:RELU_SCALAR"}),
    "swiglu": _member("gated", "swiglu", FIVE),
    "cross_entropy": _member("losses", "cross_entropy", FIVE),
    "linear_cross_entropy": _member("losses", "linear_cross_entropy", FIVE),
    "geglu": _member("gated", "geglu", FIVE),
    "dropout": _single("dropout", EAGER_TRITON_CUDA),
    "bias_gelu": _member("activations", "bias_gelu", FIVE),
    "dropout_add_layer_norm": _member("norms", "dropout_add_layer_norm", EAGER_TRITON_CUDA),
    "layer_norm": _member("norms", "layer_norm", FIVE),
    "rms_norm": _member("norms", "rms_norm", FIVE),
    "add_layer_norm": _member("norms", "add_layer_norm", FIVE),
    "add_rms_norm": _member("norms", "add_rms_norm", FIVE),
    "embedding": _single("embedding", FIVE),
    "adamw": _single("adamw", FIVE),
    "linear": _member("linear", "linear", FIVE),
    "linear_gelu": _member("linear", "linear_gelu", FIVE),
    "linear_residual": _member("linear", "linear_residual", FIVE),
    "mlp_gelu": Entry(
        "linear",
        "mlp.spec:OPERATOR",
        {
            "eager": "mlp.with_eager:IMPLEMENTATION",
            "torch": "mlp.with_torch:IMPLEMENTATION",
            "compile": "mlp.with_eager:COMPILED",
            "triton": "mlp.with_triton:IMPLEMENTATION",
            "cuda": "mlp.with_cuda:IMPLEMENTATION",
        },
    ),
    "attention": Entry(
        "attention",
        "spec:OPERATOR",
        {
            "eager": "with_eager:IMPLEMENTATION",
            "torch": "with_torch:IMPLEMENTATION",
            "torch/flash": "with_torch:FLASH_ATTENTION",
            "torch/cudnn": "with_torch:CUDNN_ATTENTION",
            "torch/efficient": "with_torch:EFFICIENT",
            "compile": "with_eager:COMPILED",
            "triton": "with_triton:IMPLEMENTATION",
            "cuda": "with_cuda:IMPLEMENTATION",
            "triton/01-online": "ladder:ONLINE",
            "triton/02-tiled": "ladder:TILED",
        },
    ),
    "attention_decode": _single("attention_decode", ("eager", "torch", "triton", "cuda")),
    "rope": _single("rope", FIVE),
    "trilinear": _single("trilinear", FIVE),
    "cumsum": _single(
        "cumsum",
        FIVE,
        **{
            "cuda/01-hillis-steele": "ladder:HILLIS_STEELE",
            "cuda/02-blelloch": "ladder:BLELLOCH",
            "cuda/03-scan-then-propagate": "ladder:SCAN_THEN_PROPAGATE",
            "cuda/04-reduce-then-scan": "ladder:REDUCE_THEN_SCAN",
            "cuda/05-decoupled-look-back": "ladder:LOOK_BACK",
        },
    ),
    "transpose": _single(
        "transpose",
        FIVE,
        **{
            "cuda/01-naive": "ladder:NAIVE",
            "cuda/02-tiled": "ladder:TILED",
            "cuda/03-padded": "ladder:PADDED",
            "cuda/04-swizzled": "ladder:SWIZZLED",
        },
    ),
    "histogram": _single(
        "histogram",
        ("eager", "torch", "triton", "cuda"),
        **{
            "cuda/01-global-atomics": "ladder:GLOBAL_ATOMICS",
            "cuda/02-shared": "ladder:SHARED",
            "cuda/03-privatised": "ladder:PRIVATISED",
            "cuda/04-warp-aggregated": "ladder:WARP_AGGREGATED",
            "cuda/05-sorted": "ladder:SORTED",
        },
    ),
    "spmv": _member(
        "sparse",
        "spmv",
        ("eager", "torch", "triton", "cuda"),
        **{
            "cuda/01-thread-a-row": "ladder:THREAD",
            "cuda/02-warp-a-row": "ladder:WARP",
            "cuda/03-adaptive-lanes": "ladder:ADAPTIVE",
        },
    ),
    "spmm": _member("sparse", "spmm", ("eager", "torch", "triton", "cuda")),
    "conv1d": _single(
        "conv1d",
        ("eager", "torch", "triton", "cuda"),
        **{
            "cuda/01-naive": "ladder:NAIVE",
            "cuda/02-register-window": "ladder:REGISTER_WINDOW",
            "cuda/03-shared-halo": "ladder:SHARED_HALO",
        },
    ),
    "conv2d": _single(
        "conv2d",
        ("eager", "torch", "cuda"),
        **{
            "cuda/01-naive": "ladder:NAIVE",
            "cuda/02-register-outputs": "ladder:REGISTER_OUTPUTS",
            "cuda/03-shared-halo": "ladder:SHARED_HALO",
        },
    ),
    "stencil": _single(
        "stencil",
        ("eager", "torch", "triton", "cuda"),
        **{
            "cuda/01-naive": "ladder:NAIVE",
            "cuda/02-shared-halo": "ladder:SHARED_HALO",
            "cuda/03-register-march": "ladder:REGISTER_MARCH",
        },
    ),
    "topk": _single("topk", ("eager", "torch", "triton", "cuda")),
    "sort": _member("sort", "sort", ("eager", "torch", "triton", "cuda")),
    "sort_keys": _member(
        "sort",
        "sort_keys",
        ("eager", "torch", "triton", "cuda"),
        **{
            "cuda/01-bitonic": "ladder:BITONIC",
            "cuda/02-separate-scan": "ladder:SEPARATE_SCAN",
            "cuda/03-exchange": "ladder:EXCHANGE",
        },
    ),
    "reduce": _member("reduce", "reduce", FIVE),
    "argreduce": _member("reduce", "argreduce", FIVE),
    "segmented_sum": _member("segments", "segmented_sum", FIVE),
    "segmented_cumsum": _member("segments", "segmented_cumsum", ("eager", "compile", "triton", "cuda")),
    "prune_2_4": _member("sparse24", "prune_2_4", ("eager", "torch", "triton", "cuda")),
    "prune_2_4_transposable": _member("sparse24", "prune_2_4_transposable", ("eager", "cuda")),
    "expand_2_4": _member("sparse24", "expand_2_4", ("eager", "torch", "triton", "cuda")),
    "sparse_linear": _member(
        "sparse24",
        "sparse_linear",
        ("eager", "triton"),
        **{"torch/cusparselt": "with_torch:SPARSE_LINEAR", "cuda": "linear_cuda:SPARSE_LINEAR"},
    ),
    "block_sparse_linear": _single("block_sparse", ("eager", "torch", "triton", "cuda")),
}

# Elementwise, row reduction, full reduction, matrix product.
# The operators that `weft bench` takes when none is named: one of each kind of work, in a minute.
FIRST_LOOK = ("gelu", "softmax", "sum", "matmul")


def operator_names() -> list[str]:
    return list(REGISTRY)


def entry(operator_name: str) -> Entry:
    """Return an operator's entry. Raise :class:`WeftError` with the nearest names if there is none."""
    if operator_name not in REGISTRY:
        raise unknown_name("operator", operator_name, operator_names())
    return REGISTRY[operator_name]


def module_name(operator_name: str, target: str) -> str:
    """The full name of a target's module: ``weft.ops.norms.with_cuda``."""
    return f"weft.ops.{entry(operator_name).package}.{target.partition(':')[0]}"


def _load(operator_name: str, target: str) -> object:
    # Imported on first use: `weft --help` and one operator's call must not import all kernels.
    return getattr(import_module(module_name(operator_name, target)), target.partition(":")[2])


@cache
def operator(name: str) -> Operator:
    """Return the operator of this name. Raise :class:`WeftError` with the nearest names if there is none."""
    loaded = _load(name, entry(name).spec)
    # A copied file that keeps the old name would be checked and timed under the wrong one.
    assert isinstance(loaded, Operator) and loaded.name == name, f"the spec of {name} is another's"
    return loaded


def implementation_names(operator_name: str) -> list[str]:
    """Return the names of an operator's implementations, in the order they are shown."""
    return list(entry(operator_name).implementations)


@cache
def implementation(operator_name: str, name: str) -> Implementation:
    """Return one implementation. Raise :class:`WeftError` with the nearest names if there is none.

    ``cuda/invariant`` is the batch-invariant variant of ``cuda``; the list of names leaves variants out.
    """
    names = implementation_names(operator_name)
    base = without_suffix(name)
    if base != name and base in names:
        variant = implementation(operator_name, base).invariant
        if variant is None:
            raise WeftError(f"implementation {name!r} of {operator_name}", got="none of this name")
        return variant
    if name not in names:
        raise unknown_name(f"implementation of {operator_name}", name, names)
    target = entry(operator_name).implementations[name]
    loaded = _load(operator_name, target)
    assert isinstance(loaded, Implementation)
    assert (loaded.operator, loaded.name) == (operator_name, name), f"{target} is {loaded.name}"
    return loaded


def implementations(operator_name: str) -> list[Implementation]:
    """Return all implementations of an operator, in the order they are shown."""
    return [implementation(operator_name, n) for n in implementation_names(operator_name)]
