"""Grammar of a claim in one sentence: operator, data type, shape, figure and GPU, in any order.

    gelu fp32 16384x16384 in 0.3 ms on a100

Every word must be understood, and none may be said twice: a sentence that is not clear is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping

from weft.core import registry
from weft.core.cases import Case
from weft.core.errors import WeftError
from weft.core.operator import BACKWARD, FORWARD
from weft.lab.claims.bounds import COLD, COPY, FORMS, WARM, Statement, build_case
from weft.machine import specs

EXAMPLES = (
    "gelu fp32 16384x16384 in 0.3 ms on a100",
    "matmul bf16 8192x8192x8192 at 700 TFLOP/s on h100 sxm",
    "softmax backward bf16 32768x4096 at 3 TB/s on h200 sxm",
)
ALIASES = {
    "gemm": "matmul",
    "matrix product": "matmul",
    "matrix multiplication": "matmul",
    "matrix multiply": "matmul",
    "mm": "matmul",
    "sdpa": "attention",
    "flash attention": "attention",
    "flashattention": "attention",
    "memcpy": COPY,
    "reduction": "sum",
    "adam": "adamw",
}
DTYPES = {
    "float64": ("fp64", "float64", "double", "f64"),
    "float32": ("fp32", "float32", "f32", "tf32"),
    "float16": ("fp16", "float16", "half", "f16"),
    "bfloat16": ("bf16", "bfloat16"),
    "float8_e4m3fn": ("fp8", "e4m3", "float8_e4m3fn", "float8"),
    "float8_e5m2": ("e5m2", "float8_e5m2"),
}
DIRECTIONS = {FORWARD: ("forward", "fwd", "forwards"), BACKWARD: ("backward", "bwd", "backwards")}
MASKS = {"causal": ("causal",), "full": ("full", "non-causal", "noncausal", "unmasked")}
CACHES = {COLD: ("cold",), WARM: ("warm", "hot", "cached")}
SECONDS = {
    **dict.fromkeys(("ns", "nanosecond", "nanoseconds"), 1e-9),
    **dict.fromkeys(("us", "microsecond", "microseconds"), 1e-6),
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
}
SMALLEST, LARGEST = 1e-12, 1e24  # of a figure, in s, B/s or FLOP/s
SI = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
# Words that carry no meaning here. One that would change it (not, over, at least) is none of them.
FILLERS = frozenset(
    re.findall(
        r"\w+",
        """
        a an the in on at of with for to it its is are was takes took needs runs ran run running reaches
        reached achieves achieved gets hits does kernel kernels operator op shape shaped size sized elements
        tensor matrix matrices rows pass per call our my we i and nvidia geforce tesla gpu card one single
        only from by using got get achieve reach measured measure
        """,
    )
)
NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
SIDE = r"(?:\d+\^\d+|\d+k?)"
SHAPE = rf"{SIDE}(?:x{SIDE})*"
START, END = r"(?<![\w.^=])", r"(?![\w^]|\.\d)"
PER_SECOND = r"(?: ?/ ?s(?:ec(?:ond)?)?| per s(?:ec(?:ond)?)?)"
FLOPS = rf"([kmgtp])flops?(?:{PER_SECOND}|ps)?"
BYTES = rf"([kmgt]i?)b(?:ytes)?{PER_SECOND}"
# 16,384 x 16,384 and 1,048,576 elements have commas of thousands; 512,512 alone could be two dimensions.
THOUSANDS = re.compile(r"(?<![\d.,(\[])\d{1,3}(?:,\d{3})+(?![\d,)\]])")


class _Sentence:
    """The words that are not read yet; what is taken becomes blanks, so that positions stay."""

    def __init__(self, text: str) -> None:
        # One letter for another: errors quote the words as they were written.
        letters = text.translate({0xB5: "u", 0x3BC: "u", 0xD7: "x"})
        self.original = THOUSANDS.sub(_without_thousands, letters)
        if not self.original.isascii() or not self.original.isprintable():
            strange = next(c for c in self.original if not (c.isascii() and c.isprintable()))
            raise not_understood(repr(strange), "letters, digits and signs of ASCII")
        self.rest = self.original.lower()

    def take(self, pattern: str) -> list[re.Match[str]]:
        """Take every match that is a word of its own."""
        matches = list(re.finditer(START + pattern + END, self.rest))
        for match in matches:
            self.blank(match.start(), match.end())
        return matches

    def blank(self, start: int, end: int) -> None:
        self.rest = self.rest[:start] + " " * (end - start) + self.rest[end:]

    def written(self, match: re.Match[str]) -> str:
        return self.original[match.start() : match.end()]

    def choose(self, what: str, words: Mapping[str, tuple[str, ...]]) -> str | None:
        """Take the one word of several; None for none. Raise :class:`WeftError` for two."""
        by_word = {word: key for key, all_words in words.items() for word in all_words}
        pattern = "|".join(sorted(map(re.escape, by_word), key=len, reverse=True))
        matches = self.take(f"(?:{pattern})")
        if len(matches) > 1:
            raise twice(what, [self.written(m) for m in matches])
        return by_word[matches[0].group()] if matches else None


def _without_thousands(match: re.Match[str]) -> str:
    before, after = match.string[: match.start()], match.string[match.end() :]
    is_side = re.search(r"[\dk](?: *[x*] *| by )$", before) or re.match(r" *[x*] *\d| by \d| elements", after)
    return match.group().replace(",", "") if is_side else match.group()


def not_understood(word: str, expected: str) -> WeftError:
    return WeftError("not understood", expected=expected, got=word, hint=_hint())


def twice(what: str, words: list[str]) -> WeftError:
    return WeftError(f"ambiguous: {what}", expected="one", got=" and ".join(words), hint=_hint())


def missing(what: str, expected: str) -> WeftError:
    return WeftError(f"the claim has no {what}", expected=expected, hint=_hint())


def _hint() -> str:
    examples = "; ".join(f'"{example}"' for example in EXAMPLES)
    return f"weft ops lists the operators, weft hardware the GPUs; for example: {examples}"


def parse(text: str) -> Statement:
    """Read a claim. Raise :class:`WeftError` with the word that is not understood, or what is missing."""
    sentence = _Sentence(text)
    gpu, gpus = _take_gpu(sentence)
    case = _take_case_name(sentence)
    operator = _take_operator(sentence)
    direction = sentence.choose("the direction", DIRECTIONS) or FORWARD
    mask = sentence.choose("the mask", MASKS)
    state = sentence.choose("the cache", CACHES)
    value, unit, figure = _take_figure(sentence)
    tf32 = bool(re.search(rf"{START}tf32{END}", sentence.rest))
    dtype = sentence.choose("the data type", DTYPES)
    shapes = _take_shapes(sentence)
    # Before the shapes are counted: the number of an unknown unit looks like one.
    _refuse_rest(sentence, gpus)
    shape, shape_text = _one_shape(shapes)
    if operator is None:
        raise missing("operator", f"one of {', '.join((COPY, *registry.operator_names()))}")
    if direction not in ((FORWARD,) if operator == COPY else registry.operator(operator).directions):
        raise WeftError(f"the direction of {operator}", expected="forward", got=direction)
    if mask and operator != "attention":
        raise WeftError(f"a mask of {operator}", expected="none", got=mask)
    if tf32 and operator != "matmul":
        raise WeftError(f"the data type of {operator}", expected="fp32: only matmul has tf32", got="tf32")
    if not gpus:
        raise missing("GPU", "a name such as a100-sxm-80gb (weft hardware lists them)")
    if figure is None or value is None:
        raise missing("figure", "a time (0.3 ms), TFLOP/s, or GB/s")
    if operator == "matmul" and dtype is not None and dtype.startswith("float8"):
        operator = "scaled_matmul"
    cases = _cases(operator, case, dtype, shape, shape_text, mask, tf32)
    return Statement(
        operator=operator,
        direction=direction,
        cases=cases,
        value=value,
        unit=unit,
        figure=figure,
        gpu=gpu,
        gpus=gpus,
        caches=(state,) if state else (COLD, WARM),
    )


def _cases(
    operator: str,
    case: str | None,
    dtype: str | None,
    shape: tuple[int, ...] | None,
    shape_text: str,
    mask: str | None,
    tf32: bool,
) -> dict[str, Case]:
    """Return the case of each reading: two for attention that is not said to be causal or full."""
    if case is not None:
        if shape is not None or dtype is not None:
            raise twice("the case", [case, shape_text or str(dtype)])
        return {"": registry.operator(operator).case(case)}
    if dtype is None:
        raise missing("data type", "fp64, fp32, tf32, bf16, fp16 or fp8")
    if shape is None:
        form = FORMS.get(operator)
        raise missing("shape", form.dimensions if form else "the name of a case")
    if re.fullmatch(r"\d+\^3", shape_text) and FORMS[operator].count == 3:
        shape = (round(shape[0] ** (1 / 3)),) * 3
    if operator != "attention":
        return {"": build_case(operator, shape, dtype, tf32=tf32)}
    readings = (mask,) if mask else ("causal", "full")
    return {r: build_case(operator, shape, dtype, causal=r == "causal") for r in readings}


def _take_gpu(sentence: _Sentence) -> tuple[str, tuple[specs.GpuSpec, ...]]:
    """Take the name of the GPU; a name of several variants stands for all of them."""
    words = [spec.name.lower().split() for spec in specs.all_specs()]
    named = _alternatives(f"rtx[ -]?{w[1]}" if w[0] == "rtx" else w[0] for w in words)
    # A bare 4090 could be a shape: it is a GPU only behind "on".
    bare = _alternatives(w[1] for w in words if w[0] == "rtx")
    form = r"(?:[ -]+(?:sxm\d?|pcie|nvl|hbm\de?|\d+ ?gi?b(?!/)))*"
    pattern = rf"(?:(?:{named})|(?<=on )(?:{bare})){form}"
    matches = sentence.take(pattern)
    if len(matches) > 1:
        raise twice("the GPU", [sentence.written(m) for m in matches])
    if not matches:
        return "", ()
    written = sentence.written(matches[0])
    gpus = specs.matching(written)
    if not gpus:
        variants = ", ".join(s.key for s in specs.matching(re.split(r"[ -]", written)[0]))
        raise not_understood(written, f"one of {variants}")
    return written, gpus


def _alternatives(words: Iterable[str]) -> str:
    """Return a pattern of any of the words; the longest comes first, so that l40s is not read as l4."""
    return "|".join(sorted(set(words), key=len, reverse=True))


def _take_case_name(sentence: _Sentence) -> str | None:
    """Take the name of a registered case, such as ``bf16-64x1024x768-50304-1024``."""
    matches = sentence.take(r"(?:fp32|fp16|bf16|fp64|tf32|e4m3|e5m2)-[\w^.]+(?:-[\w^.]+)*")
    if len(matches) > 1:
        raise twice("the case", [m.group() for m in matches])
    return matches[0].group() if matches else None


def _take_operator(sentence: _Sentence) -> str | None:
    names: dict[str, tuple[str, ...]] = {name: _spellings(name) for name in registry.operator_names()}
    names[COPY] = (COPY,)
    for alias, name in ALIASES.items():
        names[name] += _spellings(alias)
    return sentence.choose("the operator", names)


def _spellings(name: str) -> tuple[str, ...]:
    words = re.split(r"[_ ]", name)
    return tuple(dict.fromkeys(sign.join(words) for sign in ("_", " ", "-", "")))


def _take_figure(sentence: _Sentence) -> tuple[float | None, str, str | None]:
    """Take the claimed figure: its value in s, B/s or FLOP/s, that unit, and the figure as written."""
    units = "|".join(sorted(SECONDS, key=len, reverse=True))
    figures = []
    for match in sentence.take(rf"({NUMBER}) ?(?:({units})|{FLOPS}|{BYTES})"):
        number, time_unit, flops_prefix, bytes_prefix = match.groups()
        written = sentence.written(match)
        if re.search(r"[KMGT]i?b\b", written):
            raise not_understood(written, "bytes: GB/s, not Gb/s")
        if time_unit:
            figures.append((float(number) * SECONDS[time_unit], "s", written))
        elif flops_prefix:
            figures.append((float(number) * SI[flops_prefix], "FLOP/s", written))
        else:
            figures.append((float(number) * (SI | BINARY)[bytes_prefix], "B/s", written))
    if len(figures) > 1:
        raise twice("the figure", [written for _, _, written in figures])
    if not figures:
        return None, "", None
    value, unit, written = figures[0]
    if not SMALLEST <= value <= LARGEST:
        raise not_understood(written, "a figure above 0 that a GPU could have")
    return value, unit, written


def _take_shapes(sentence: _Sentence) -> list[str]:
    """Take every shape: 16384x16384, 16384*16384, 8 by 8, (16384, 16384), 16kx16k (k is 1024), 2^28."""
    for match in list(re.finditer(r"[(\[]\s*\d+k?(?:\s*,\s*\d+k?)+\s*,?\s*[)\]]", sentence.rest)):
        inner = "x".join(re.findall(r"\d+k?", match.group()))
        before, after = sentence.rest[: match.start()], sentence.rest[match.end() :]
        sentence.rest = before + inner.ljust(len(match.group())) + after
    sentence.rest = re.sub(r"(?<=[\dk])(?: *[x*] *| by )(?=\d)", "x", sentence.rest)
    return [match.group() for match in sentence.take(SHAPE)]


def _one_shape(shapes: list[str]) -> tuple[tuple[int, ...] | None, str]:
    if len(shapes) > 1:
        raise twice("the shape", shapes)
    if not shapes:
        return None, ""
    return tuple(_side(side) for side in shapes[0].split("x")), shapes[0]


def _side(text: str) -> int:
    base, _, exponent = text.partition("^")
    if exponent:
        if int(exponent) > 64 or len(base) > 6:
            raise not_understood(text, "a dimension below 2^64")
        value = int(base) ** int(exponent)
    else:
        value = int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)
    if value >= 1 << 64:
        raise not_understood(text, "a dimension below 2^64")
    return value


def _words(text: str) -> Iterator[str]:
    yield from (w for raw in text.split() if (w := raw.strip("()[].,;:!\"'")))


def _refuse_rest(sentence: _Sentence, gpus: tuple[specs.GpuSpec, ...]) -> None:
    for word in _words(sentence.rest):
        if word in FILLERS:
            continue
        if not gpus and re.search(rf"\bon (?:an? )?{re.escape(word)}", sentence.rest):
            raise not_understood(word, f"a GPU: {', '.join(s.key for s in specs.all_specs())}")
        if word == "%":
            raise not_understood(word, "a figure: a time (0.3 ms), TFLOP/s, or GB/s")
        names = [name for operator in registry.operator_names() for name in _spellings(operator)]
        close = difflib.get_close_matches(word, names, n=1)
        near = f" (near it: {close[0]})" if close else ""
        raise not_understood(word, f"an operator{near}, data type, shape, figure, direction or GPU")
