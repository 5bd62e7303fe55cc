"""Calls of an implementation: inputs, buffers, staging, guarded memory, seeds, selection."""
