"""Correctness: the rules, the float64 oracle and the tolerance."""
