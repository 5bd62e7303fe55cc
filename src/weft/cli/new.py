"""``weft new``: write a starter file for a kernel, which passes its check, or an extension project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli import output
from weft.core.errors import WeftError

EPILOG = """Examples:
  weft new softmax --backend triton
  weft new --operator silu --in-tree
  weft new --extension tiles

A file: weft help kernel. A project: weft help extension.
In the tree: weft help recipes"""


def new(
    operator: Annotated[
        str | None, typer.Argument(metavar="OPERATOR", help="Operator of Weft, as listed by weft ops")
    ] = None,
    backend: Annotated[
        str, typer.Option(metavar="triton|cuda|numba|eager", help="Backend of the starter file")
    ] = "triton",
    own: Annotated[
        str | None,
        typer.Option(
            "--operator", metavar="NAME", help="Create a new operator (reference, cases, cost) called NAME"
        ),
    ] = None,
    extension: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Create a project that packages kernels as a PyTorch extension"),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="File or folder to write [default: OPERATOR_BACKEND.py or .cu, or NAME]"
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="Name of the implementation in tables [default: BACKEND/mine]"
        ),
    ] = None,
    in_tree: Annotated[
        bool,
        typer.Option(
            "--in-tree", help="With --operator, in a checkout of Weft: add the operator to Weft itself"
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files")] = False,
) -> None:
    """Write a working, commented starter file for a kernel. It is correct, but not tuned.

    With --extension: a folder with a PyTorch extension in CUDA that can be built in four ways.

    With --operator NAME --in-tree: the operator's folder in src/weft/ops and its line in the registry.

    The path goes to stdout, the next steps to stderr.
    """
    targets = {"OPERATOR": operator, "--operator": own, "--extension": extension}
    chosen = [option for option, value in targets.items() if value is not None]
    if len(chosen) != 1:
        raise WeftError(
            "weft new",
            expected="exactly one of OPERATOR, --operator NAME and --extension NAME",
            got=" and ".join(chosen) or "none",
            hint="weft new softmax --backend triton",
        )
    if in_tree:
        _add_to_tree(own, {"--out": out, "--name": name, "--force": force or None})
        return
    if extension is not None:
        _write_extension(extension, Path(out or extension), name, force)
        return
    from weft.scaffold import starters

    language = backend if operator else "triton"  # the starter of a new operator is in Triton
    target = Path(out or starters.file_name(operator or own or "", backend if operator else None))
    if target.suffix != starters.ending(language):
        raise WeftError("--out", expected=f"a file that ends in {starters.ending(language)}", got=str(target))
    labels = {"name": name or f"{language}/mine", "file": str(target)}
    if operator:
        text = starters.starter(operator, backend, **labels)
    else:
        text = starters.own_operator(own or "", **labels)
    _write(target, text, force)
    print(target)
    argument = f" {operator}" if operator else ""
    output.log(
        "The kernel is correct, but not tuned. Next:\n"
        f"  weft check{argument} --with {target}    check it at a sample of its cases\n"
        f"  weft bench{argument} --with {target}    measure the time and the distance from the limit"
    )


def _add_to_tree(operator: str | None, other_options: dict[str, object]) -> None:
    """Add an operator to the checkout of the working directory; print the files, then the next steps."""
    from weft.scaffold import in_tree

    misplaced = [option for option, value in other_options.items() if value is not None]
    if operator is None or misplaced:
        raise WeftError(
            "weft new --in-tree",
            expected="--operator NAME and no other option",
            got=" and ".join(misplaced) or "no --operator",
            hint="weft new --operator silu --in-tree",
        )
    root = in_tree.find_checkout(Path.cwd())
    for path in in_tree.add_operator(operator, root):
        print(path.relative_to(root))
    steps = {
        f"weft check {operator}": "check all implementations at all cases",
        f"weft ops {operator}": "show its implementations and cases",
        f"python -m pytest tests/ops -k {operator}": "run the tests that the registry adds",
        "make docs": "regenerate the lists of operators in README and docs",
    }
    width = max(map(len, steps))
    output.log("The operator computes SiLU until you change it: spec.py first, then with_*.py. Next:")
    for command, purpose in steps.items():
        output.log(f"  {command:{width}}  {purpose}")
    output.log("weft help recipes has the steps to add CUDA and measured times.")
    if not Path(in_tree.__file__).is_relative_to(root):
        output.log(
            f"note: this weft is not the checkout's ({Path(in_tree.__file__).parents[2]}); "
            "run it with PYTHONPATH=src, or install the checkout with pip install -e ."
        )


def _write_extension(extension: str, folder: Path, name: str | None, force: bool) -> None:
    """Write the project; raise :class:`WeftError` for an invalid name or folder."""
    from weft.scaffold.extension import write

    if name is not None:
        hint = f"weft new --extension {name}"
        raise WeftError("--name names an implementation, not an extension", hint=hint)
    write(extension, folder, force=force)
    print(folder)
    output.log(
        "The project contains relu, add and matmul as examples to replace. Next:\n"
        f"  cd {folder}\n"
        "  python build_all.py                         build in four ways and compare the results\n"
        "  pip install --no-build-isolation . && python -m pytest\n"
        "  README.md                                   when to choose each way"
    )


def _write(target: Path, text: str, force: bool) -> None:
    """Write the file; raise :class:`WeftError` if it exists, unless forced, or cannot be written."""
    try:
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise WeftError(
            f"{target} exists already", hint="--force overwrites it, --out chooses another file"
        ) from error
    except OSError as error:
        raise WeftError(f"{target} cannot be written", got=error.strerror) from error
