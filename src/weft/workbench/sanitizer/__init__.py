"""Runs of an implementation under NVIDIA's compute-sanitizer."""
