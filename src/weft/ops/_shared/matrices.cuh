// Fragments of products from shared memory: ldmatrix. Source: NVIDIA's PTX ISA.
#pragma once

// Four 8 x 8 matrices of half types; lane i gives the row i % 8 of matrix i / 8. TURN transposes.
template <bool TURN> __device__ __forceinline__ void matrices(unsigned (&r)[4], unsigned at) {
  if constexpr (TURN)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
