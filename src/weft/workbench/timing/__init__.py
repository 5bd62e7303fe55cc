"""Timing sessions, CPU and CUDA clocks, rechecks, statistics and integrity."""
