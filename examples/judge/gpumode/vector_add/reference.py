"""The sum of two float16 matrices, drawn on the GPU."""

import torch
from task import input_t, output_t
from utils import make_match_reference


def generate_input(size: int, seed: int) -> input_t:
    generator = torch.Generator(device="cuda")
    generator.manual_seed(seed)
    shape = (size, size)
    a = torch.randn(shape, device="cuda", dtype=torch.float16, generator=generator)
    b = torch.randn(shape, device="cuda", dtype=torch.float16, generator=generator)
    return a, b


def ref_kernel(data: input_t) -> output_t:
    a, b = data
    return a + b


check_implementation = make_match_reference(ref_kernel, rtol=1e-2, atol=1e-2)
