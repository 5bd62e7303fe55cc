"""Counts of 256 values, one of which may be crowded: integers, to be met exactly."""

import torch
from task import input_t, output_t
from utils import verbose_allequal


def generate_input(size: int, contention: float, seed: int) -> input_t:
    generator = torch.Generator(device="cuda")
    generator.manual_seed(seed)
    values = torch.randint(0, 256, (size,), device="cuda", generator=generator)
    crowded = torch.randint(0, 256, (), device="cuda", generator=generator)
    here = torch.rand(size, device="cuda", generator=generator) < contention / 100.0
    values[here] = crowded
    return values


def ref_kernel(data: input_t) -> output_t:
    return torch.bincount(data, minlength=256)


def check_implementation(data, output):
    reasons = verbose_allequal(output, ref_kernel(data))
    return "; ".join(reasons)
