"""Where softmax's rows come from: shared with the other operators that work row by row."""

from weft.ops._shared.rows import as_rows, width

__all__ = ["as_rows", "width"]
