"""Names of GPU kernels: who wrote each kernel that a profiler lists."""
