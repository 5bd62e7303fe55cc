"""Explanations of a kernel's speed: profile, static inspection and hardware counters."""
