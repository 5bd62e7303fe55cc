"""Loop transformations on a CPU: three programs in variants, their cache misses and times, and what each
transformation becomes in a GPU kernel."""
