"""Formats that people already have, read unchanged: KernelBench's and GPU MODE's."""
