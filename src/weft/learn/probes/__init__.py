"""Probes of the graders: memory with guard bands, threads in lockstep, float32 numbers, a fake device.

Each makes a fault visible in every run that a plain test would show by chance only: a store past the end, a
missing barrier, an escape to float64, a clock that is read too early.
"""
