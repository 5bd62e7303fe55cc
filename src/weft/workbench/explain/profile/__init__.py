"""Profile of an implementation: the time of a call by three instruments, its kernels and a flame graph.

``workload`` binds a subject to its inputs, ``instruments`` measure the same calls by a schedule, and
``agreement`` compares them. ``stacks`` folds the trace, ``flame`` draws it, ``rows`` lists the kernels,
``output_files`` writes the files, and ``session`` runs all of it.
"""
