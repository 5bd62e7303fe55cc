"""Comparison of two sets of records: faster, slower, same or ambiguous."""
