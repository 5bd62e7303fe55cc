// Reads the cycle counter of each SM beside the GPU's clock in nanoseconds. Two readings around some kernels
// give the mean SM clock while they ran, which NVML tells only now and then.
//
// out: (SMs, 2) of long long. Launched with several blocks for each SM; each SM's last one stays.

extern "C" __global__ void read_sm_clock(long long* out) {
  if (threadIdx.x != 0) return;
  unsigned sm;
  long long cycles, nanoseconds;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  asm volatile("mov.u64 %0, %%clock64;\n\tmov.u64 %1, %%globaltimer;" : "=l"(cycles), "=l"(nanoseconds));
  out[sm * 2] = cycles;
  out[sm * 2 + 1] = nanoseconds;
}
