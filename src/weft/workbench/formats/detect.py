"""Which of the formats two files are in, told from what they define; nothing is run for it."""

from __future__ import annotations

from pathlib import Path

from weft.core import WeftError
from weft.workbench.formats.files import reference_facts
from weft.workbench.formats.gpumode import reference_file

KERNELBENCH, GPUMODE = "kernelbench", "gpumode"


def detect(reference: Path, candidate: Path) -> str:
    """The format's name; raises :class:`WeftError` where the reference is in neither.

    The candidate only has to be there: what is wrong with it is a verdict, and no wrong call.
    """
    if not reference.exists():
        raise WeftError("REFERENCE", expected="a file or a folder", got=f"{reference}: not there")
    if not candidate.is_file():
        raise WeftError("CANDIDATE", expected="a .py file", got=candidate)
    path = reference_file(reference)
    names = reference_facts(path).names
    if {"generate_input", "ref_kernel", "check_implementation"} & names:
        return GPUMODE
    if {"Model", "get_inputs", "get_init_inputs"} & names:
        return KERNELBENCH
    raise WeftError(
        f"{path} is in no format known here",
        expected="class Model with get_inputs() (KernelBench), or generate_input() with "
        "ref_kernel() (GPU MODE)",
        got=f"a file that defines {', '.join(sorted(names)) or 'nothing'}",
        hint="an operator of one's own is brought with --with: docs/bring.md",
    )
