"""Toolchains: each file turns an implementation's source into something callable.

A toolchain knows whether it can run on this machine. None of them knows an operator's maths.
"""

from weft.backends import environment
from weft.backends.support import backend_support, missing_package, support

__all__ = ["backend_support", "environment", "missing_package", "support"]
