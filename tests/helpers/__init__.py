"""Shared parts of the tests: toy operators, planted faults, emulators, sample records."""
