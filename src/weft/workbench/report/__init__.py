"""The report: records in, one self-contained page out.

``rows`` makes records safe to draw, ``devices`` gathers them, ``roofline``, ``bandwidth``,
``charts`` and ``ladders`` place marks, ``page`` fills the templates. Nothing here runs a kernel or
imports torch.
"""

from weft.workbench.report.files import load
from weft.workbench.report.page import page

__all__ = ["load", "page"]
