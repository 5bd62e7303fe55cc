"""Question and answer cards about GPU kernels, made from facts that the repository has checked.

No figure is typed here: each comes from the table of GPUs, an operator's cost, a committed record, the ledger
of claims or the glossary, and the card names it. A test recomputes them and looks for digits in the texts of
this file.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from weft.core import FORWARD, registry
from weft.core.errors import WeftError
from weft.core.text import printable
from weft.lab.claims import ledger
from weft.machine import specs
from weft.workbench import pages

RATE = "bf16"
TERM = re.compile(r"\| \*\*(.+?)\*\* \| (.+) \|")
LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
SECTION = "## How kernels work"
LEVELS = {  # series of the record -> what its fastest plateau is the latency of
    "chase_l1": "a load from L1",
    "chase_l2": "a load past L1 from the nearest L2",
    "chase_shared": "a load from shared memory",
}
FIGURES = {  # key of the record -> the question about it
    "host_launch": "How long does a launch of a kernel occupy the host?",
    "device_gap": "How long after a kernel does the next one of the same stream begin, at least?",
    "device_node": "How long after a node of a CUDA graph does the next one begin, at least?",
    "event_pair": "How long do two CUDA events with nothing between them measure?",
    "dram_copy": "What bandwidth does a copy reach, read and written bytes together?",
    "dram_read": "What bandwidth does a kernel that only reads reach?",
    "peak_read_shared": "How many bytes a cycle does an SM read from its shared memory?",
}


@dataclass(frozen=True, kw_only=True)
class Card:
    """A question with its answer, its topic and the source of its figures."""

    id: str
    topic: str
    question: str
    answer: str
    source: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def cards() -> tuple[list[Card], dict[str, str]]:
    """Return all cards, and for each topic that cannot be made here the reason.

    Records and the glossary are in a checkout; an installation may lack them.
    """
    deck: list[Card] = []
    missing: dict[str, str] = {}
    for topic, make in TOPICS.items():
        try:
            deck += list(make())
        except WeftError as error:
            missing[topic] = str(error)
    return deck, missing


def _hardware() -> Iterator[Card]:
    for spec in specs.all_specs():
        source = str(spec.document)
        low, high = spec.bandwidth_gbps
        width = f"{high:,.0f} GB/s" if low == high else f"{low:,.0f} to {high:,.0f} GB/s (documents disagree)"
        yield Card(
            id=f"bandwidth-{spec.key}",
            topic="hardware",
            question=f"What memory bandwidth does the {spec.name} have, by its data sheet?",
            answer=width,
            source=source,
        )
        rate, ridge, square = spec.rate(RATE), spec.ridge(RATE), spec.smallest_square(RATE)
        if rate is not None and ridge is not None:
            yield Card(
                id=f"ridge-{spec.key}",
                topic="hardware",
                question=f"From how many FLOPs a byte on can a dense {RATE} kernel be compute-bound on the "
                f"{spec.name}?",
                answer=f"{ridge:,.0f} FLOPs a byte: {rate / 1e12:,.4g} TFLOP/s over {width}. "
                f"A product of square matrices needs n = {square:,} or more.",
                source=source,
            )


def _floors() -> Iterator[Card]:
    """Yield the least bytes and time of each operator's largest timed case, on the device of the records."""
    gpu = specs.find(ledger.record(f"{ledger.MEASURED}/hierarchy.json")["device"]["name"])[0]
    for name in registry.operator_names():
        operator = registry.operator(name)
        timed = operator.select("bench", "cuda")
        if not timed:
            continue
        case = max(timed, key=lambda c: operator.cost(c, FORWARD).nbytes)
        cost = operator.cost(case, FORWARD)
        roof = gpu.roof(cost)
        if roof is None:
            continue
        answer = f"{_four_digits(cost.nbytes / 1e6)} MB"
        if cost.flops:
            answer += f" and {_four_digits(cost.flops / 1e9)} GFLOP"
        yield Card(
            id=f"floor-{name}",
            topic="floors",
            question=f"How many bytes must {name} move at {case.name}, forward, and what is its shortest "
            f"possible time on an {gpu.name}?",
            answer=f"{answer}; {_four_digits(roof.seconds * 1e6)} us, bound by {roof.limit}. "
            "Each input is read once, each output written once.",
            source=f"cost of weft.ops.{name}; {gpu.document}",
        )


def _latencies() -> Iterator[Card]:
    record = ledger.record(f"{ledger.MEASURED}/hierarchy.json")
    device, source = record["device"]["name"], f"results/{ledger.MEASURED}/hierarchy.json"
    series = {s["key"]: s for s in record["series"]}
    for key, what in LEVELS.items():
        fastest = series[key]["plateaus"][0]
        yield Card(
            id=f"latency-{key}",
            topic="latencies",
            question=f"How long does {what} take on an {device}, one after another?",
            answer=f"about {fastest['value']:.0f} cycles, {fastest['ns']:.0f} ns",
            source=source,
        )
    slowest = series["chase_l1"]["plateaus"][-1]
    yield Card(
        id="latency-dram",
        topic="latencies",
        question=f"How long does a load from memory beyond all caches take on an {device}?",
        answer=f"about {slowest['value']:.0f} cycles, {slowest['ns']:.0f} ns",
        source=source,
    )
    for figure in record["figures"]:
        if figure["key"] in FIGURES:
            yield Card(
                id=f"figure-{figure['key']}",
                topic="latencies",
                question=f"{FIGURES[figure['key']]} ({device})",
                answer=_quantity(figure["value"], figure["unit"]),
                source=source,
            )
    names = {"threads_per_sm": "threads", "registers_per_sm": "registers", "blocks_per_sm": "blocks"}
    for key, what in names.items():
        yield Card(
            id=f"limit-{key}",
            topic="latencies",
            question=f"How many {what} can an SM of an {device} hold at once?",
            answer=f"{record['device'][key]:,}",
            source=source,
        )


def _four_digits(value: float) -> str:
    """Return a number with four digits, or as a whole number."""
    return f"{value:,.0f}" if value >= 1e3 else f"{value:.4g}"


def _quantity(value: float, unit: str) -> str:
    return f"{value / 1e12:.3g} TB/s" if unit == "B/s" else f"{value:.3g} {unit}"


def _demos() -> Iterator[Card]:
    from weft.lab.demos import demo as find_demo

    record = ledger.record(f"{ledger.MEASURED}/demos.json")
    device = record["machine"]["device"]
    for result in record["demos"]:
        demo = find_demo(result["name"])
        yield Card(
            id=f"demo-{result['name']}",
            topic="demonstrations",
            question=f"{result['name'].replace('-', ' ').capitalize()}: how many times as long does the slow "
            f"kernel of the demonstration take on an {device}?",
            answer=f"{result['ratio']:.3g} times as long. Rule: {demo.sentence}. {demo.because}",
            source=f"results/{ledger.MEASURED}/demos.json",
        )


def _claims() -> Iterator[Card]:
    for claim in ledger.all_claims():
        yield Card(
            id=f"claim-{claim.id}",
            topic="claims",
            question=f"True, false, or does it depend? {claim.text}",
            answer=f"{claim.expected.capitalize()}. {claim.argument}",
            source=f"weft claims {claim.id}; {claim.source}",
        )


def _terms() -> Iterator[Card]:
    text = pages.page("glossary").text()
    section = text.partition(SECTION)[2].partition("\n## ")[0]
    for term, meaning in TERM.findall(section):
        yield Card(
            id="term-" + re.sub(r"\W+", "-", term.lower()),
            topic="terms",
            question=f"GPU kernels: what is meant by {term}?",
            answer=LINK.sub(r"\g<1>", meaning).replace("`", ""),
            source="weft help glossary",
        )


TOPICS: dict[str, Callable[[], Iterator[Card]]] = {
    "terms": _terms,
    "latencies": _latencies,
    "hardware": _hardware,
    "floors": _floors,
    "demonstrations": _demos,
    "claims": _claims,
}


def anki(deck: list[Card]) -> str:
    """Return cards as tab-separated text with the header lines that Anki's import reads.

    Columns: id (so that a later import updates the cards), question, answer with its source, tags.
    """
    file = io.StringIO()
    file.write("#separator:tab\n#html:false\n#notetype:Basic\n#guid column:1\n#tags column:4\n")
    writer: Any = csv.writer(file, delimiter="\t", lineterminator="\n")
    for card in deck:
        texts = (card.question, f"{card.answer} (Source: {card.source})")
        writer.writerow([f"weft-{card.id}", *(printable(" ".join(t.split())) for t in texts), card.topic])
    return file.getvalue()
