// Matrix fragments from shared memory for tensor core products. Source: NVIDIA's PTX ISA, ldmatrix.
#pragma once

// Loads four 8 x 8 matrices of a 16-bit type. Lane i passes the shared address of row i % 8 of matrix i / 8.
// Register r[m] of a lane then holds the two adjacent elements of matrix m that mma expects there.
template <bool TRANSPOSE> __device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned address) {
  if constexpr (TRANSPOSE)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
