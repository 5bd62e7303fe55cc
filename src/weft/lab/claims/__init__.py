"""Claims about speed and cost: is a sentence possible by the hardware's limits, and which sayings are true.

``sentence`` reads a claim and ``bounds`` judges it; ``ledger`` has the claims that the field repeats, each
with a function that computes its verdict.
"""
