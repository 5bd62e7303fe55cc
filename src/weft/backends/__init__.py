"""Toolchains: how an implementation's source becomes something callable, and whether it can here.

One file a toolchain. None of them knows any operator's maths.
"""

from weft.backends import environment
from weft.backends.support import backend_support, support

__all__ = ["backend_support", "environment", "support"]
