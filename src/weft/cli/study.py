"""``weft study``: time programs over their sizes or their loop nests, and show what limits them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

import typer

from weft.cli import ending, output, progress
from weft.cli.options import Device, Json
from weft.core.json_files import content_errors, read_json

EPILOG = """Examples:
  weft study mlp --device cpu --quick --out study
  weft study loops --programs product=500,sum
  weft study sparsity --sizes 4096x4096x4096 --densities 0.5,0.1,0.02

Measurement, fits and results: weft help study.
The other two: weft help loops, weft help sparsity"""
STUDIES = {
    "mlp": "weft.cli.study_mlp",
    "loops": "weft.cli.study_loops",
    "sparsity": "weft.cli.study_sparsity",
}
LIST = "as a list such as 1,2,4"
Depths = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help=f"mlp: numbers of layers, {LIST}. A size that does not vary stays at the middle of its list",
    ),
]
Programs = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="loops: product, stencil, sum, each with a size or without: product=500,sum [default: all]",
    ),
]
Sizes = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="sparsity: rows of x, outputs and inputs, as a list such as 4096x4096x4096,16x4096x4096",
    ),
]
Densities = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="sparsity: shares of the weight that stay, as a list"),
]
OutputFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Output folder of the record and the pictures [default: study-STUDY]"
    ),
]


class Study(Protocol):
    """Module of one study: what it takes, measures, draws and prints."""

    OPTIONS: tuple[str, ...]  # names of the options that it takes beside those of every study
    FILE: str  # name of its record in the output folder
    PARTIAL: str  # field that a stopped study has if it is worth saving

    def format_number(self) -> int: ...

    def measure(
        self, device: str | None, options: Mapping[str, str | None], quick: bool
    ) -> dict[str, Any]: ...

    def plot_all(self, record: Mapping[str, Any], out: Path) -> list[Path]: ...

    def show(self, record: dict[str, Any]) -> None: ...

    def verdict(self, record: Mapping[str, Any], ending_text: str, stopped: bool) -> str: ...


def study(
    name: Annotated[str, typer.Argument(metavar="STUDY", help="Study to run: mlp, loops or sparsity")],
    device: Device = None,
    depths: Depths = None,
    widths: Annotated[str | None, typer.Option(metavar="LIST", help="mlp: layer widths, as a list")] = None,
    batches: Annotated[str | None, typer.Option(metavar="LIST", help="mlp: batch sizes, as a list")] = None,
    steps: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="mlp: numbers of consecutive training steps, as a list"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="fp32|bf16|fp16", help="mlp, sparsity: data type [default: by the device]"),
    ] = None,
    programs: Programs = None,
    languages: Annotated[
        str | None, typer.Option(metavar="LIST", help="loops: c, numba or both [default: c,numba]")
    ] = None,
    sizes: Sizes = None,
    densities: Densities = None,
    out: OutputFolder = None,
    redraw: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the pictures of this record again; measure nothing"),
    ] = None,
    no_pictures: Annotated[
        bool, typer.Option("--no-pictures", help="Write only the record, without matplotlib")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Use small sizes, in less than a minute")] = False,
    as_json: Json = False,
) -> None:
    """Study what limits a program: an MLP's sizes, loop nests, or the sparsity of a weight.

    mlp times an MLP over steps, layers, width and batch, to show how it scales; it writes study.json and
    five pictures. loops times a product, a stencil and a sum on the CPU before and after interchange,
    tiling, unrolling, fusion and more, with their cache misses; it writes loops.json and a picture.
    sparsity times dense, 2:4, block and unstructured weights by density, in inference and training, and
    finds where each is faster than dense; it writes sparsity.json and a picture, light and dark.

    Exit 0: good; 1: a result, a FLOP count or a time is wrong; 2: invalid arguments.
    """
    own_options = {"depths": depths, "widths": widths, "batches": batches, "steps": steps, "dtype": dtype}
    own_options |= {"programs": programs, "languages": languages, "sizes": sizes, "densities": densities}
    chosen = _study(name, own_options)
    folder = _output_folder(name, out)
    if not no_pictures and getattr(chosen, "NEEDS_MATPLOTLIB", True):
        _require_matplotlib()
    watch = ending.Stopwatch()
    with progress.stoppable() as stop:
        if redraw is not None:
            record = _read(redraw, name, chosen)
        else:
            record = chosen.measure(device, {o: own_options[o] for o in chosen.OPTIONS}, quick)
    if stop:
        record = (stop.partial or {}) | stop.to_json()
    with nullcontext() if redraw is None else content_errors(redraw, f"a {chosen.FILE}"):
        files = _write(chosen, record, folder, redrawn=redraw is not None, draw=not (no_pictures or stop))
        if as_json:
            print(json.dumps(record))
        elif chosen.PARTIAL in record:
            chosen.show(record)
        if stop and chosen.PARTIAL not in record:
            line = f"stopped before enough was measured ({watch}); nothing is saved"
        else:
            line = chosen.verdict(record, f"({watch}){files}", bool(stop))
    ending.print_verdict(line, to_stderr=as_json)
    if stop or record["wrong"]:
        raise typer.Exit(stop.exit_code or 1)


def _write(chosen: Study, record: dict[str, Any], folder: Path, *, redrawn: bool, draw: bool) -> str:
    """Write the record and the pictures; return the files as the last line names them."""
    text = ""
    if not redrawn and chosen.PARTIAL in record:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / chosen.FILE).write_text(json.dumps(record, indent=1) + "\n")
        text = f"; saved in {folder / chosen.FILE}"
    pictures = chosen.plot_all(record, folder) if draw else []
    for path in pictures:
        output.log(f"picture: {path}")
    return text + (f"; {ending.count_text(len(pictures), 'picture')}" if pictures else "")


def _study(name: str, options: Mapping[str, str | None]) -> Study:
    """Return a study's module; raise :class:`WeftError` for an unknown one or another study's option."""
    from weft.core import WeftError

    if name not in STUDIES:
        *names, last = STUDIES
        raise WeftError("a study", expected=f"{', '.join(names)} or {last}", got=name)
    chosen = cast(Study, import_module(STUDIES[name]))
    foreign = [f"--{o}" for o, value in options.items() if value is not None and o not in chosen.OPTIONS]
    if foreign:
        expected = ", ".join(f"--{o}" for o in chosen.OPTIONS)
        got = ", ".join(foreign)
        raise WeftError(f"options of weft study {name}", expected=f"none but {expected}", got=got)
    return chosen


def _output_folder(name: str, out: Path | None) -> Path:
    from weft.core import WeftError

    folder = Path(f"study-{name}") if out is None else out
    if folder.exists() and not folder.is_dir():
        raise WeftError("--out", expected="a folder", got=f"the file {folder}")
    return folder


def _require_matplotlib() -> None:
    """Raise :class:`WeftError` without matplotlib: before the measurement, which takes minutes."""
    from importlib.util import find_spec

    from weft.core import WeftError

    if find_spec("matplotlib") is None:
        raise WeftError(
            "the study's pictures are drawn with matplotlib",
            got="none",
            hint="pip install 'weft[plots]', or --no-pictures now and --redraw elsewhere",
        )


def _read(path: Path, name: str, chosen: Study) -> dict[str, Any]:
    """Read a study's record; raise :class:`WeftError` for anything else."""
    from weft.core import WeftError

    try:
        record = read_json(path)
    except (OSError, ValueError) as error:
        raise WeftError("--redraw", expected=f"a {chosen.FILE}", got=f"{path}: {error}") from error
    known = chosen.format_number()
    if not isinstance(record, dict) or (record.get("study"), record.get("format")) != (name, known):
        expected = f"a study of the {name} in format {known}"
        raise WeftError("--redraw", expected=expected, got=path)
    return record
