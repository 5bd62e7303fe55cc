"""Adds in place and hands back its input, which saves writing elsewhere."""

from task import input_t, output_t


def custom_kernel(data: input_t) -> output_t:
    a, b = data
    return b.add_(a)
