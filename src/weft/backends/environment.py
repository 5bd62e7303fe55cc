"""Switch triton and numba to interpretation on a machine without a GPU, before either is imported.

Both read an environment variable once, at import, and ``torch.compile`` imports triton too. This module is
therefore imported first in ``weft.backends``. A variable that is already set is left as it is.
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
# A check runs small grids on a large GPU; numba's advice about them is noise.
os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")
