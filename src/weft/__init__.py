"""Weft: is a GPU kernel right, how fast is it, and how far is it from the machine's limit?"""

from weft.core.errors import WeftError

__version__ = "0.1.0"
__all__ = ["WeftError", "__version__"]
