"""Which toolchains interpret: decided before triton or numba is first imported, by anyone.

Both read an environment variable once, at import, and ``torch.compile`` imports triton too. So this
module comes first in ``weft.backends``; a variable that is set already is left as it is.
"""

from __future__ import annotations

import os
import sys

from weft import machine

SWITCHES = {"triton": "TRITON_INTERPRET", "numba": "NUMBA_ENABLE_CUDASIM"}

if not machine.has_gpu():
    for _module, _variable in SWITCHES.items():
        if _module not in sys.modules:
            os.environ.setdefault(_variable, "1")
# A toy grid on a big GPU is what a check runs; numba's advice about it would be noise.
os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")
