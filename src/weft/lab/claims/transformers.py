"""Claims about transformers: FLOPs and bytes of training and inference, optimizer states, caches, "
"sparsity."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core import registry
from weft.core.cases import ITEMSIZE
from weft.core.cost import Cost
from weft.lab.claims.bounds import build_case, operator_cost
from weft.lab.claims.ledger import (
    COMMON,
    DEPENDS,
    FALSE,
    MEASURED,
    TRUE,
    Evidence,
    Source,
    claim,
    record,
)
from weft.machine import specs

SCALING = Source(
    "Jared Kaplan et al.", "Scaling Laws for Neural Language Models", 2020, "https://arxiv.org/abs/2001.08361"
)
ZERO = Source(
    "Samyam Rajbhandari et al.",
    "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    2019,
    "https://arxiv.org/abs/1910.02054",
)
FLASH = Source("Tri Dao et al.", "FlashAttention", 2022, "https://arxiv.org/abs/2205.14135")
FLASH2 = Source("Tri Dao", "FlashAttention-2", 2023, "https://arxiv.org/abs/2307.08691")
SPARSE = Source(
    "Asit Mishra et al.", "Accelerating Sparse Deep Neural Networks", 2021, "https://arxiv.org/abs/2104.08378"
)
GROUPED = Source(
    "Joshua Ainslie et al.",
    "GQA: Training Generalized Multi-Query Transformer Models",
    2023,
    "https://arxiv.org/abs/2305.13245",
)
MIXED = Source(
    "Paulius Micikevicius et al.", "Mixed Precision Training", 2017, "https://arxiv.org/abs/1710.03740"
)
INFERENCE = Source(
    "Reiner Pope et al.",
    "Efficiently Scaling Transformer Inference",
    2022,
    "https://arxiv.org/abs/2211.05102",
)
RECOMPUTATION = Source(
    "Vijay Korthikanti et al.", "Reducing Activation Recomputation in Large Transformer Models", 2022,
    "https://arxiv.org/abs/2205.05198",
)  # fmt: skip
CUT_LOSSES = Source(
    "Erik Wijmans et al.",
    "Cut Your Losses in Large-Vocabulary Language Models",
    2024,
    "https://arxiv.org/abs/2411.09009",
)
_DOCUMENT = specs.one("h100-sxm").document
DATASHEET = Source("NVIDIA", _DOCUMENT.title.removeprefix("NVIDIA "), _DOCUMENT.year, _DOCUMENT.url)
VOCABULARY = 50257


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder with a feed-forward layer of four times the width."""

    layers: int
    width: int
    vocabulary: int = VOCABULARY

    @property
    def block_parameters(self) -> int:
        """Weights of the blocks' products: 4 d^2 for attention, 8 d^2 for the feed-forward layer."""
        return 12 * self.layers * self.width**2

    @property
    def parameters(self) -> int:
        """Parameters that take part in products; the output layer shares its weight with the embedding."""
        return self.block_parameters + self.vocabulary * self.width

    def training_flops(self, length: int) -> float:
        """FLOPs a token of forward and backward: products, and attention without a mask."""
        products = 6.0 * self.parameters
        return products + 12.0 * self.layers * length * self.width


GPT2, GPT2_XL = Decoder(12, 768), Decoder(48, 1600)
GPT3, LLAMA_7B = Decoder(96, 12288), Decoder(32, 4096, 32000)


@claim(
    "six-n-per-token",
    "Training a transformer takes 6 N FLOPs a token, within a tenth.",
    SCALING,
    argument="Products of forward and backward, 6 N, plus attention, 12 L T d, over 6 N",
    expected=DEPENDS,
)
def training_takes_6n_flops() -> Evidence:
    models = {
        "GPT-2 124M, T = 1024": (GPT2, 1024),
        "GPT-2 1.5B, T = 1024": (GPT2_XL, 1024),
        "GPT-3 175B, T = 2048": (GPT3, 2048),
        "a 7B model, T = 4096": (LLAMA_7B, 4096),
    }
    ratios = {name: m.training_flops(t) / (6 * m.parameters) for name, (m, t) in models.items()}
    return Evidence(
        {name: ratio <= 1.1 for name, ratio in ratios.items()},
        {f"FLOPs / 6 N, {name}": ratio for name, ratio in ratios.items()},
    )


@claim(
    "gpt2-step-8-18-tflop",
    "A training step of GPT-2 124M takes 8 to 18 TFLOP.",
    COMMON,
    argument="FLOPs a token at T = 1024 times the tokens of a step",
    expected=DEPENDS,
)
def gpt2_step_takes_8_to_18_tflop() -> Evidence:
    per_token = GPT2.training_flops(1024)
    batches = {f"{b} sequences": b * 1024 * per_token / 1e12 for b in (4, 8, 16, 32, 512)}
    return Evidence(
        {name: 8 <= tflop <= 18 for name, tflop in batches.items()},
        {f"TFLOP, {name}": tflop for name, tflop in batches.items()},
    )


@claim(
    "attention-dominates",
    "Attention scores dominate the FLOPs of a transformer.",
    COMMON,
    argument="Scores and weighted values, 4 T d a token and layer, over all FLOPs of a block, 24 d^2 + 4 T "
    "d: more than half from T = 6 d on",
    expected=DEPENDS,
)
def attention_dominates() -> Evidence:
    sizes = {
        "d = 768, T = 1024": (768, 1024),
        "d = 4096, T = 8192": (4096, 8192),
        "d = 4096, T = 32768": (4096, 32768),
        "d = 12288, T = 2048": (12288, 2048),
    }
    shares = {name: t / (6 * d + t) for name, (d, t) in sizes.items()}
    return Evidence(
        {name: share > 0.5 for name, share in shares.items()},
        {f"share, {name}": share for name, share in shares.items()},
    )


def _attention(length: int, *, causal: bool = False, direction: str = "forward") -> Cost:
    case = build_case("attention", (1, 16, length, 128), "bfloat16", causal=causal)
    return operator_cost("attention", case, direction)


@claim(
    "attention-quadratic-memory",
    "The memory of attention grows with the square of the sequence length.",
    FLASH,
    argument="Bytes at twice the length over bytes at the length: of a kernel that keeps the scores on the "
    "chip by the cost model, and of one that writes them",
    expected=DEPENDS,
)
def attention_memory_is_quadratic() -> Evidence:
    def with_scores(length: int) -> int:
        return _attention(length).nbytes + 2 * 16 * length**2 * ITEMSIZE["bfloat16"]

    growth = {
        "scores in memory": with_scores(16384) / with_scores(8192),
        "scores on the chip": _attention(16384).nbytes / _attention(8192).nbytes,
    }
    return Evidence(
        {name: ratio > 3 for name, ratio in growth.items()},
        {f"growth at twice the length, {name}": ratio for name, ratio in growth.items()},
    )


@claim(
    "flash-fewer-flops",
    "FlashAttention is faster because it computes fewer FLOPs.",
    COMMON,
    argument="FLOPs of the cost model over those of the two products; its backward computes the scores "
    "again. What falls is the number of bytes.",
    expected=FALSE,
)
def flash_attention_computes_less() -> Evidence:
    length, heads, size = 4096, 16, 128
    products = 2 * 2.0 * heads * length**2 * size
    forward = _attention(length).flops / products
    # The scores are computed in the forward and again in the backward: five products instead of four.
    backward = _attention(length, direction="backward").flops / (2 * products)
    scores = 2 * heads * length**2 * ITEMSIZE["bfloat16"]
    figures = {"FLOPs, forward": forward, "FLOPs, backward": backward}
    figures["bytes with scores in memory / on the chip"] = 1 + scores / _attention(length).nbytes
    return Evidence({"forward": forward < 1, "backward": backward < 1}, figures)


@claim(
    "causal-halves-attention",
    "A causal mask halves the work of attention, within 5 %.",
    FLASH2,
    argument="Pairs of 128 x 128 tiles on and below the diagonal over all pairs",
    expected=DEPENDS,
)
def causal_mask_halves_attention() -> Evidence:
    shares = {t: (t // 128 + 1) / (2 * (t // 128)) for t in (256, 1024, 4096, 16384)}
    return Evidence(
        {f"T = {t}": share <= 0.5 * 1.05 for t, share in shares.items()},
        {f"share of tiles, T = {t}": share for t, share in shares.items()},
    )


@claim(
    "backward-twice-forward",
    "A backward pass costs twice its forward pass.",
    COMMON,
    argument="FLOPs of products and bytes of memory-bound operators, by the cost models",
    expected=DEPENDS,
)
def backward_costs_twice() -> Evidence:
    shapes = {
        "matmul": (4096, 4096, 4096),
        "attention": (4, 16, 4096, 128),
        "gelu": (8192, 8192),
        "layer_norm": (8192, 8192),
        "rope": (4, 16, 4096, 128),
    }
    settings, figures = {}, {}
    for name, shape in shapes.items():
        case = build_case(name, shape, "bfloat16")
        forward, backward = (operator_cost(name, case, d) for d in ("forward", "backward"))
        ratio = backward.flops / forward.flops if forward.flops else backward.nbytes / forward.nbytes
        settings[name], figures[f"backward / forward, {name}"] = abs(ratio - 2) < 0.05, ratio
    return Evidence(settings, figures)


@claim(
    "sixteen-bytes-a-parameter",
    "Training with Adam takes 16 bytes of memory a parameter, without activations.",
    ZERO,
    argument="Bytes of weight, gradient and states a parameter, by the inputs of the optimizer's cases",
    expected=DEPENDS,
)
def adam_takes_16_bytes() -> Evidence:
    settings, figures = {}, {}
    for case in registry.operator("adamw").select("bench", "cuda"):
        elements = max(i.numel for i in case.inputs)
        nbytes = sum(i.nbytes for i in case.inputs if i.numel == elements) / elements
        settings[case.name], figures[f"bytes, {case.name}"] = round(nbytes) == 16, nbytes
    return Evidence(settings, figures)


@claim(
    "mixed-precision-halves-memory",
    "Mixed precision halves the memory of training.",
    MIXED,
    argument="Bytes of an activation in 16 bits over 32; and of weight, gradient and states a parameter by "
    "the optimizer's cases, with a master copy over all in float32",
    expected=DEPENDS,
)
def mixed_precision_halves_memory() -> Evidence:
    adam = registry.operator("adamw")

    def nbytes(case: str) -> int:
        return sum(i.nbytes for i in adam.case(case).inputs)

    ratios = {
        "activations": ITEMSIZE["bfloat16"] / ITEMSIZE["float32"],
        "weights, gradients and states of Adam": nbytes("bf16-124m-master") / nbytes("fp32-124m"),
    }
    return Evidence(
        {name: ratio <= 0.5 for name, ratio in ratios.items()},
        {f"share of the memory, {name}": ratio for name, ratio in ratios.items()},
    )


@claim(
    "grouped-heads-shrink-cache",
    "Sharing keys and values among groups of heads shrinks their cache by the size of a group, and so the "
    "bytes of attention when tokens are generated.",
    GROUPED,
    argument="Bytes of the cache, and of reading it for one query and 8192 keys, with 8 heads of keys and "
    "with 32",
    expected=TRUE,
)
def grouped_heads_shrink_the_cache() -> Evidence:
    cached = _cache_bytes(LLAMA_7B, 8192, heads=32, cached_heads=8)
    cache_ratio = _cache_bytes(LLAMA_7B, 8192, heads=32, cached_heads=32) / cached
    item, query = ITEMSIZE["bfloat16"], 2 * 32 * 128  # the query and the output of one token
    moved = {heads: item * (query + 2 * heads * 8192 * 128) for heads in (8, 32)}
    ratio = moved[32] / moved[8]
    settings = {"the cache": cache_ratio == 4, "bytes of one token's attention, within 1 %": ratio > 4 * 0.99}
    return Evidence(settings, {"cache": cache_ratio, "bytes of one token's attention": ratio})


@claim(
    "optimizer-step-negligible",
    "The time of the optimizer step is negligible: less than 2 % of a training step.",
    COMMON,
    argument="Roofs on {h200}: 28 bytes a parameter for AdamW in fp32 against the step's FLOPs in bf16, by "
    "the number of tokens",
    expected=DEPENDS,
)
def optimizer_step_is_negligible() -> Evidence:
    gpu = specs.one("h200")
    cost = operator_cost("adamw", build_case("adamw", (GPT2.parameters,), "float32"), "forward")
    optimizer = cost.nbytes / gpu.bandwidth
    shares = {}
    for tokens in (1 << 13, 1 << 16, 1 << 19):
        step = tokens * GPT2.training_flops(1024) / (gpu.rate("bf16") or 1)
        shares[f"{tokens} tokens a step"] = optimizer / (optimizer + step)
    return Evidence(
        {name: share < 0.02 for name, share in shares.items()},
        {f"share, {name}": share for name, share in shares.items()},
    )


def _cache_bytes(model: Decoder, length: int, *, heads: int, cached_heads: int, item: float = 2) -> float:
    return 2 * model.layers * length * model.width * cached_heads / heads * item


@claim(
    "kv-cache-half-megabyte",
    "The cache of keys and values of a 7B model takes half a mebibyte a token.",
    COMMON,
    argument="2 tensors x 32 layers x 4096 x 2 bytes, with all 32 heads cached, or fewer, or in 8 bits",
    expected=DEPENDS,
)
def cache_takes_half_a_mebibyte() -> Evidence:
    forms = {
        "32 cached heads, 16 bits": _cache_bytes(LLAMA_7B, 1, heads=32, cached_heads=32),
        "8 cached heads, 16 bits": _cache_bytes(LLAMA_7B, 1, heads=32, cached_heads=8),
        "32 cached heads, 8 bits": _cache_bytes(LLAMA_7B, 1, heads=32, cached_heads=32, item=1),
    }
    return Evidence(
        {name: nbytes == 1 << 19 for name, nbytes in forms.items()},
        {f"KiB a token, {name}": nbytes / 1024 for name, nbytes in forms.items()},
    )


@claim(
    "cache-exceeds-weights",
    "In inference, the cache of keys and values is small beside the weights.",
    COMMON,
    argument="Bytes of both in 16 bits for a 7B model",
    expected=DEPENDS,
)
def cache_is_small() -> Evidence:
    weights = 2.0 * LLAMA_7B.parameters
    settings, figures = {}, {}
    for batch, length, cached_heads in ((1, 2048, 32), (1, 32768, 32), (32, 4096, 32), (32, 4096, 8)):
        nbytes = batch * _cache_bytes(LLAMA_7B, length, heads=32, cached_heads=cached_heads)
        name = f"{batch} x {length} tokens, {cached_heads} heads"
        settings[name], figures[f"cache / weights, {name}"] = nbytes < 0.1 * weights, nbytes / weights
    return Evidence(settings, figures)


@claim(
    "decoding-memory-bound",
    "Generating tokens is bound by memory bandwidth.",
    INFERENCE,
    argument="A layer's products with one token a sequence, in bf16, against the ridge of {h100_sxm}: the "
    "weights are read once for the whole batch",
    expected=DEPENDS,
)
def decoding_is_memory_bound() -> Evidence:
    ridge = specs.one("h100-sxm").ridge("bf16") or 0
    settings, figures = {}, {"ridge": ridge}
    for batch in (1, 32, 256, 512):
        cost = operator_cost("matmul", build_case("matmul", (batch, 12288, 4096), "bfloat16"), "forward")
        intensity = cost.flops / cost.nbytes
        settings[f"batch {batch}"], figures[f"FLOPs a byte, batch {batch}"] = intensity < ridge, intensity
    return Evidence(settings, figures)


@claim(
    "decoding-200-tokens",
    "A 7B model generates over 200 tokens a second for a single user on {a100_sxm_80gb}.",
    COMMON,
    argument="Bandwidth over the bytes of the weights, which each token reads",
    expected=DEPENDS,
)
def a_7b_model_generates_200_tokens() -> Evidence:
    bandwidth = specs.one("a100-sxm-80gb").bandwidth
    rates = {f"{bits} bits a weight": bandwidth / (LLAMA_7B.parameters * bits / 8) for bits in (16, 8, 4)}
    return Evidence(
        {name: rate > 200 for name, rate in rates.items()},
        {f"tokens a second at most, {name}": rate for name, rate in rates.items()},
    )


@claim(
    "sparsity-halves-weights",
    "2:4 sparsity halves the memory of the weights.",
    COMMON,
    argument="Of four weights, two values stay, each with two bits for its position: 9/16 for 16-bit weights",
    expected=FALSE,
)
def sparsity_halves_the_weights() -> Evidence:
    shares = {f"{bits}-bit weights": (2 * bits + 2 * 2) / (4 * bits) for bits in (16, 8)}
    return Evidence(
        {name: share <= 0.5 for name, share in shares.items()},
        {f"share of memory, {name}": share for name, share in shares.items()},
    )


@claim(
    "sparsity-doubles-speed",
    "2:4 sparsity doubles the speed of a linear layer.",
    SPARSE,
    argument="Roofs on {h100_sxm} with half the FLOPs at best and 9/16 of the weights' bytes, by the "
    "number of rows",
    expected=DEPENDS,
)
def sparsity_doubles_the_speed() -> Evidence:
    gpu = specs.one("h100-sxm")
    settings, figures = {}, {}
    for rows in (16, 256, 8192):
        dense = operator_cost("matmul", build_case("matmul", (rows, 8192, 8192), "bfloat16"), "forward")
        weight = 2 * 8192 * 8192
        sparse = Cost(
            read=dense.read - weight * 7 // 16, written=dense.written, flops=dense.flops / 2, rate=dense.rate
        )
        times = [roof.seconds for cost in (dense, sparse) if (roof := gpu.roof(cost))]
        settings[f"{rows} rows"] = times[0] / times[1] >= 1.95
        figures[f"speed-up at best, {rows} rows"] = times[0] / times[1]
    return Evidence(settings, figures)


@claim(
    "fp8-doubles-everything",
    "FP8 doubles the speed of training.",
    COMMON,
    argument="Roofs on {h100_sxm} in bf16 over fp8: of products with a bf16 result, and of parts that stay "
    "as they are",
    expected=DEPENDS,
)
def fp8_doubles_everything() -> Evidence:
    gpu = specs.one("h100-sxm")
    settings, figures = {}, {}
    for shape in ((8192, 8192, 8192), (1024, 1024, 1024), (16, 8192, 8192)):
        costs = [
            operator_cost(name, build_case(name, shape, dtype), "forward")
            for name, dtype in (("matmul", "bfloat16"), ("scaled_matmul", "float8_e4m3fn"))
        ]
        times = [roof.seconds for cost in costs if (roof := gpu.roof(cost))]
        name = f"product of {'x'.join(map(str, shape))}"
        settings[name], figures[f"speed-up, {name}"] = times[0] / times[1] >= 1.95, times[0] / times[1]
    adam = registry.operator("adamw")
    settings["the optimizer, which has no fp8 dtype"] = any(d.startswith("float8") for d in adam.dtypes)
    settings["layer norm, which has no fp8 dtype"] = any(
        d.startswith("float8") for d in registry.operator("layer_norm").dtypes
    )
    return Evidence(settings, figures)


@claim(
    "recomputation-third",
    "Recomputing all activations in the backward adds a third to the FLOPs of training.",
    RECOMPUTATION,
    argument="One more forward beside a forward and a backward of twice its FLOPs, by the cost model of a "
    "product",
    expected=TRUE,
)
def recomputation_adds_a_third() -> Evidence:
    case = build_case("matmul", (4096, 4096, 4096), "bfloat16")
    forward, backward = (operator_cost("matmul", case, d).flops for d in ("forward", "backward"))
    added = forward / (forward + backward)
    return Evidence({"products": abs(added - 1 / 3) < 0.01}, {"added share": added})


@claim(
    "output-layer-negligible",
    "The output layer over the vocabulary is a negligible part of a model's FLOPs.",
    COMMON,
    argument="Its weights over all weights of products",
    expected=DEPENDS,
)
def output_layer_is_negligible() -> Evidence:
    models = {"GPT-2 124M": GPT2, "GPT-2 1.5B": GPT2_XL, "a 7B model": LLAMA_7B, "GPT-3 175B": GPT3}
    shares = {name: m.vocabulary * m.width / m.parameters for name, m in models.items()}
    return Evidence(
        {name: share < 0.03 for name, share in shares.items()},
        {f"share, {name}": share for name, share in shares.items()},
    )


@claim(
    "fused-loss-saves-memory",
    "A loss that never stores the logits saves over 90 % of the memory beside inputs and gradients.",
    CUT_LOSSES,
    argument="Recorded peak memory of the linear layer with cross entropy, of several implementations",
    expected=TRUE,
)
def fused_loss_saves_memory() -> Evidence:
    rows = record(f"{MEASURED}/linear_cross_entropy-memory.json")["rows"]
    extra = {row["implementation"]: row["extra_bytes"] for row in rows}
    saved = {name: 1 - extra["cuda"] / extra[name] for name in ("eager", "torch", "compile")}
    return Evidence(
        {f"against {name}": share > 0.9 for name, share in saved.items()},
        {f"share saved against {name}": share for name, share in saved.items()},
    )


@claim(
    "all-reduce-grows",
    "In data-parallel training, the bytes that each GPU sends grow with the number of GPUs.",
    COMMON,
    argument="A ring sends each of N parts 2 (N - 1) times: 2 (N - 1) / N of the gradient, less than twice "
    "it",
    expected=FALSE,
)
def all_reduce_grows() -> Evidence:
    def sent(gpus: int) -> float:
        parts = [0] * gpus  # parts that each GPU sends: a reduce-scatter, then an all-gather
        for _ in range(2 * (gpus - 1)):
            parts = [count + 1 for count in parts]
        return max(parts) / gpus

    shares = {n: sent(n) for n in (2, 8, 64, 512)}
    settings = {f"{a} to {b} GPUs": shares[b] / shares[a] >= b / a for a, b in ((2, 8), (8, 64), (64, 512))}
    return Evidence(settings, {f"sent / gradient, {n} GPUs": share for n, share in shares.items()})


@claim(
    "sharding-half-more-communication",
    "Sharding the weights as well (ZeRO stage 3) takes one and a half times the communication of data "
    "parallelism.",
    ZERO,
    argument="Two all-gathers of the weights and a reduce-scatter of the gradients, against a "
    "reduce-scatter and an all-gather",
    expected=TRUE,
)
def sharding_costs_half_more() -> Evidence:
    def collective(gpus: int) -> float:
        return (gpus - 1) / gpus

    ratios = {n: 3 * collective(n) / (2 * collective(n)) for n in (2, 8, 64)}
    return Evidence(
        {f"{n} GPUs": r == 1.5 for n, r in ratios.items()}, {f"ratio, {n} GPUs": r for n, r in ratios.items()}
    )


@claim(
    "h100-2000-tflops",
    "{h100_sxm} computes about 2000 TFLOP/s in bf16.",
    DATASHEET,
    argument="The figure is that with 2:4 sparsity; dense it is SMs x 4096 FLOP x clock",
    expected=FALSE,
)
def h100_computes_2000_tflops() -> Evidence:
    gpu = specs.one("h100-sxm")
    dense = gpu.tflops["bf16"]
    by_clock = (gpu.sm_count or 0) * 4096 * (gpu.matrix_mhz or 0) * 1e6 / 1e12
    settings = {"a dense product, by the table": dense >= 1900, "by clock and units": by_clock >= 1900}
    return Evidence(settings, {"TFLOP/s, table": dense, "TFLOP/s, by clock": by_clock})


@claim(
    "a100-to-h100-three-times",
    "{h100_sxm} is three times as fast as {a100_sxm_80gb}.",
    COMMON,
    argument="Ratios of the roofs of the same cases in bf16",
    expected=DEPENDS,
)
def h100_is_three_times_as_fast() -> Evidence:
    shapes = {
        "matmul": (8192, 8192, 8192),
        "attention": (4, 16, 4096, 128),
        "softmax": (32768, 4096),
        "gelu": (8192, 8192),
    }
    settings, figures = {}, {}
    for name, shape in shapes.items():
        cost = operator_cost(name, build_case(name, shape, "bfloat16"), "forward")
        gpus = (specs.one("a100-sxm-80gb"), specs.one("h100-sxm"))
        times = [roof.seconds for gpu in gpus if (roof := gpu.roof(cost))]
        settings[name], figures[f"ratio, {name}"] = times[0] / times[1] >= 3, times[0] / times[1]
    return Evidence(settings, figures)
