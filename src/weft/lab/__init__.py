"""Experiments on the machine: demonstrations, memory hierarchy, studies, host time."""
