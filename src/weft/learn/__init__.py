"""A path of short graded exercises that needs no GPU. README.md has the format of an exercise.

``exercise`` reads an exercise's folder, ``progress`` the learner's folder. ``grade`` runs a solution in a
process of its own (``grade_main``), and ``cuda_program`` compiles CUDA C++ with g++ against ``emulator/``.
"""
