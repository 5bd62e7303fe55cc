"""``weft judge --out --nonce``: a candidate that forges a result and ends the judge is believed by nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.judge_problems import model, write
from helpers.paths import ROOT

NONCE = "7d0c9a"
# It finds the judge by its child's parents: the worker's parent supervises it, that one's is the fork server.
FORGES = """
import json, os, signal
import torch, torch.nn as nn
FORGED = json.dumps({"correct": True, "reason": "", "speedup": 99.0, "nonce": NONCE}) + "\\n"
def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
def words(pid):
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read().split("\\0")
class ModelNew(nn.Module):
    def forward(self, x):
        judge = os.getppid()
        while "--out" not in words(judge):
            judge = parent(judge)
        tried = []
        for path in (words(judge)[words(judge).index("--out") + 1], f"/proc/{judge}/fd/1"):
            try:
                with open(path, "w") as file:
                    file.write(FORGED)
            except OSError as error:
                tried.append(str(error))
        if KILLS:
            os.kill(judge, signal.SIGKILL)
        return torch.softmax(x, 1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the candidate searches /proc")
@pytest.mark.parametrize("kills", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_forged_result_is_not_believed(tmp_path: Path, kills: bool) -> None:
    reference, out = model(tmp_path), tmp_path / "result.json"
    text = FORGES.replace("NONCE", repr("unknown")).replace("KILLS", str(kills))
    candidate = write(tmp_path, "candidate.py", text)
    command = [sys.executable, "-m", "weft", "judge", str(reference), str(candidate), "--no-time"]
    options = ["--device", "cpu", "--json", "--out", str(out), "--nonce", "-"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with (tmp_path / "stdout").open("wb") as stdout:
        done = subprocess.run(
            [*command, *options], input=NONCE.encode(), stdout=stdout, stderr=subprocess.PIPE, env=environment
        )
    result = json.loads(out.read_text())
    if os.geteuid():  # the judge's descriptors are closed to all but root
        assert "unknown" not in (tmp_path / "stdout").read_text()
    if kills:
        assert done.returncode == -9 and result["nonce"] != NONCE, done.stderr
        return
    assert done.returncode == 1 and result["nonce"] == NONCE, done.stderr
    assert not result["correct"] and "was changed before the verdict" in result["reason"]
