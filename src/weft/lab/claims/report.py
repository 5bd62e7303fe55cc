"""Markdown of the pages about hardware and claims: the table of GPUs, the ledger, the schemes of products."""

from __future__ import annotations

from weft.lab import fast_matmul
from weft.lab.claims import ledger
from weft.lab.claims.sentence import EXAMPLES
from weft.machine import specs
from weft.workbench.report.markdown import table
from weft.workbench.report.overview import transcript

UNKNOWN = "–"


def _text(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:g}"


def hardware_table() -> str:
    """Return the table of GPUs: units, memory, rates and ridge points."""
    head = ["GPU", "SMs", "MHz", "L2 MiB", "smem KiB", "GB", "GB/s", *specs.RATES, "ridge", "square", "W"]
    rows = []
    for gpu in specs.all_specs():
        low, high = gpu.bandwidth_gbps
        half = "bf16" if "bf16" in gpu.tflops else "fp16"
        rows.append(
            [
                f"`{gpu.key}`",
                *map(_text, (gpu.sm_count, gpu.boost_mhz, gpu.l2_mib, gpu.smem_kib, gpu.memory_gb)),
                f"{high:g}" if low == high else f"{low:g} or {high:g}",
                *(_text(gpu.tflops.get(rate)) for rate in specs.RATES),
                f"{gpu.ridge(half):.0f}",
                _text(gpu.smallest_square(half)),
                _text(gpu.tdp_w),
            ]
        )
    return table(head, rows, " " + "r" * (len(head) - 1))


def documents_table() -> str:
    """Return the vendor's document of each GPU, with the notes."""
    rows = [
        [f"`{gpu.key}`", f"[{gpu.document.title}]({gpu.document.url}), {gpu.document.year}", gpu.note]
        for gpu in specs.all_specs()
    ]
    return table(["GPU", "document", "note"], rows)


def example(previous: str) -> str:
    """Return a ``weft claim`` with its output; ``previous`` is the block of the page as it is."""
    return transcript(f'weft claim "{EXAMPLES[0]} sxm 80gb"', previous)


def claims_table(theme: str) -> str:
    """Return the claims of a theme with their computed verdicts, ranges and sources."""
    rows = []
    for claim in ledger.all_claims():
        if claim.theme != theme:
            continue
        evidence = claim.compute()
        source = f"[{claim.source}]({claim.source.url})" if claim.source.url else str(claim.source)
        rows.append([f"`{claim.id}`", claim.text, f"**{evidence.verdict}**", evidence.range, source])
    return table(["ID", "claim", "verdict", "settings", "source"], rows)


def schemes_table() -> str:
    """Return the shipped schemes of matrix multiplication, each verified when it is loaded."""
    rows = []
    for name in fast_matmul.SCHEMES:
        scheme = fast_matmul.scheme(name)
        additions = f"{sum(scheme.additions)}"
        figures = (additions, f"{scheme.plain_additions}", f"{scheme.exponent:.3f}")
        label = scheme.label.replace("<", "&lt;").replace(">", "&gt;")
        rows.append([f"`{name}`", label, *figures, scheme.source])
    head = ["scheme", "size and rank", "additions", "without shared sums", "exponent", "source"]
    return table(head, rows, "  rrr")


def crossover_table() -> str:
    """Return the size from which one level of Winograd's form can pay, by GPU and rate."""
    scheme, rates = fast_matmul.scheme("winograd"), ("fp32", "bf16")
    rows = []
    for gpu in specs.all_specs():
        cells = []
        for name in rates:
            rate = gpu.rate(name)
            if rate is None:
                cells.append(UNKNOWN)
            else:
                size = fast_matmul.crossover(scheme, rate, gpu.bandwidth, int(specs.ITEM_BYTES[name]))
                cells.append(f"{size:.0f}")
        rows.append([f"`{gpu.key}`", *cells])
    return table(["GPU", *(f"n, {name}" for name in rates)], rows, " rr")
