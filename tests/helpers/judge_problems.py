"""Small problems in the formats of other suites, written into a folder for a test."""

from __future__ import annotations

from pathlib import Path

MODEL = """
import torch, torch.nn as nn
class Model(nn.Module):
    def forward(self, x):
        return {body}
def get_inputs():
    return [torch.rand(3, 5)]
def get_init_inputs():
    return []
"""
TASK = """
import torch
from task import input_t, output_t
from utils import make_match_reference
def generate_input(size: int, seed: int) -> input_t:
    g = torch.Generator(device="cuda")
    g.manual_seed(seed)
    {data}
def ref_kernel(data: input_t) -> output_t:
    {body}
check_implementation = make_match_reference(ref_kernel)
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def model(folder: Path, body: str = "torch.softmax(x, 1)") -> Path:
    return write(folder, "reference.py", MODEL.format(body=body))


def task(folder: Path, data: str, body: str, yml: str = "tests:\n  - {size: 7, seed: 3}\n") -> Path:
    write(folder, "task.yml", yml)
    return write(folder, "reference.py", TASK.format(data=data, body=body)).parent
