"""The CUDA ladder of the sum: one idea a file, each step an implementation like any other."""
