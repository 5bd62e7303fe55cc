"""A product of float16 matrices with entries between 0 and 1."""

import torch
from task import input_t, output_t
from utils import make_match_reference


def generate_input(m: int, n: int, k: int, seed: int) -> input_t:
    generator = torch.Generator(device="cuda")
    generator.manual_seed(seed)
    a = torch.empty(m, k, device="cuda", dtype=torch.float16)
    b = torch.empty(k, n, device="cuda", dtype=torch.float16)
    return a.uniform_(0, 1, generator=generator), b.uniform_(0, 1, generator=generator)


def ref_kernel(data: input_t) -> output_t:
    a, b = data
    return a @ b


check_implementation = make_match_reference(ref_kernel, rtol=1e-2, atol=1e-2)
