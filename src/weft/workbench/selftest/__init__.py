"""Planted wrong kernels and honest controls that test Weft itself."""
