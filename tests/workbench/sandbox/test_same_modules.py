"""A candidate cannot see in `sys.modules` for which purpose its process was started."""

from __future__ import annotations

from pathlib import Path

from weft.core import FORWARD, registry
from weft.workbench.check.check import check
from weft.workbench.sandbox.caller import WorkerProcess
from weft.workbench.sandbox.observed_kernels import observe_in_worker
from weft.workbench.sources.source import Source

CANDIDATE = """
import os, sys
import torch
import weft

FOLDER = {folder!r}

def save(when):
    with open(os.path.join(FOLDER, f"{{when}}-{{os.getpid()}}"), "w") as file:
        watched = ("weft", "torch.prof", "torch._dynamo")
        file.write("\\n".join(sorted(m for m in sys.modules if m.startswith(watched))))

save("loaded")

@weft.implementation("gelu", backend="eager", name="sees", directions=("forward",))
def sees(x):
    save("called")
    return torch.nn.functional.gelu(x, approximate="tanh")
"""


def test_a_process_that_lists_kernels_has_the_modules_of_all_others(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    file = tmp_path / "sees.py"
    file.write_text(CANDIDATE.format(folder=str(seen)))
    source, gelu = Source(kind="file", path=str(file)), registry.operator("gelu")
    case = gelu.case("fp32-33x65-sliced")
    with WorkerProcess(source) as worker:
        (implementation,) = worker.implementations
        verdict = check(gelu, implementation, case, FORWARD, "cpu", make_caller=worker.make_caller)
    observed = observe_in_worker(source, implementation, case, "cpu")
    assert verdict.status == "pass", verdict.reason
    assert observed.violations == {} and observed.kernels
    for when in ("loaded", "called"):
        checked, listed = (f.read_text() for f in seen.glob(f"{when}-*"))
        assert checked == listed and "weft.workbench.kernels.provenance" in checked
        # The first call would otherwise import it in each process, which takes a second.
        assert "torch._dynamo" in checked.split("\n")
