"""The report: one self-contained HTML page, and tables, from records.

``device_records`` reads records and makes them safe to show. ``roofline``, ``charts`` and ``ladders`` compute
plots of them, ``page`` fills the templates. Nothing here runs a kernel or imports torch.
"""

from weft.workbench.report.device_records import load
from weft.workbench.report.page import page

__all__ = ["load", "page"]
