"""Sample logs of compute-sanitizer, in the forms of its guide and of its versions since 2021."""

MEMCHECK = """\
========= COMPUTE-SANITIZER
the program's own words
========= Invalid __global__ write of size 4 bytes
=========     at out_of_bounds_function(float *)+0xb0 in toys.cu:39
=========     by thread (8,0,0) in block (7,0,0)
=========     Address 0x7cc43a800fa0 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7cc43a800000 of size 4,000 bytes
=========         Device Frame: doubled_past_the_end(const float *, float *)+0x30 in toys.cu:44
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: main [0xae66] in memcheck_demo
=========
========= Invalid __global__ write of size 4 bytes
=========     at out_of_bounds_function(float *)+0xb0 in toys.cu:39
=========     by thread (9,0,0) in block (7,0,0)
=========     Address 0x7cc43a800fa4 is out of bounds
=========         Device Frame: doubled_past_the_end(const float *, float *)+0x30 in toys.cu:44
=========
========= Invalid __shared__ read of size 16 bytes
=========     at unaligned_kernel():0x160 in memcheck_demo.cu:6
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x8 is misaligned
=========
========= Target application returned an error
========= ERROR SUMMARY: 769 errors
========= ERROR SUMMARY: 766 errors were not printed. Use --print-limit option to adjust
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at sumKernel(int *, int *)+0x90 in /a/err.cu:41
=========     and Read access at sumKernel(int *, int *)+0x100 in /a/err.cu:51 [508 hazards]
=========     and Write access at sumKernel(int *, int *)+0x110 in /a/err.cu:52 [4 hazards]
=========
========= Warning: Race reported between Write access at void warp<(int)32>(int *)+0x40 in w.cu:4
=========     and Read access at void warp<(int)32>(int *)+0x80 in w.cu:5 [64 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at vectorAdd(int *)+0x70 in memset_error.cu:41
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= Uninitialized __global__ memory read of size 8 bytes
=========     at void at::native::reduce_kernel<(int)4, at::native::CUDAFunctor>(int)+0x2a0
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f3c7ed00000
=========
========= ERROR SUMMARY: 2 errors
"""
SYNCCHECK = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at [clone myKernel(int *, int *)] outlineSync()+0x11f0 in test.cu:42
=========     by thread (32,0,0) in block (0,0,0)
=========     Device Frame: myKernel(int *, int *)+0xe40 in test.cu:60
=========
========= Barrier error detected. Invalid arguments
=========     at __cuda_sm70_warpsync+0x30
=========     by thread (0,0,0) in block (0,0,0)
=========     Device Frame:__syncwarp(unsigned int)+0xf0 in /usr/local/sm_30_intrinsics.hpp:110
=========     Device Frame:myKernel(int *)+0x3c0 in /home/user/illegal_syncwarp.cu:48
=========
========= ERROR SUMMARY: 2 errors
"""
OLD = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 1 bytes
=========     at 0x150 in void cudf::count_set_bits_kernel<int=256>(unsigned int const *,int)
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7fc406200400 is out of bounds
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at 0x100 in /home/user/src/52_sum.cl:30:sum_gpu_2(const int *, int *, unsigned int)
=========     by thread (98,0,0) in block (194,0,0)
=========     Address 0x7fbbca800000
=========
========= ERROR SUMMARY: 2 errors
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
NO_RACE = """\
========= COMPUTE-SANITIZER
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""
REFUSED = """\
========= COMPUTE-SANITIZER
========= Error: Device not supported. Please refer to the "Supported Devices" section of the \
sanitizer documentation
=========
========= ERROR SUMMARY: 1 error
"""
# As version 2026.4 printed it on a machine with no GPU; with --require-cuda-init=no it exits 0.
NOT_STARTED = """\
========= COMPUTE-SANITIZER
========= Error: process didn't terminate successfully
=========     The application may have hit an error when dereferencing Unified Memory from the host.
========= Error: Target application terminated before first instrumented API call
"""
UNTRACKED = CLEAN + (
    "========= Internal Sanitizer Error: The Sanitizer encountered an error while launching k and "
    "didn't track the launch. Errors might go undetected.\n"
)
