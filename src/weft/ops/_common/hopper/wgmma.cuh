// Operands and accumulators of wgmma: D (64 x N, float32 in registers) += A (64 x 16) B (16 x N), both
// factors in shared memory, 16-bit. A warp group (four warps, 128 threads) computes a product together.
//
// A tile in shared memory has rows of 128 bytes, whose 16-byte chunks are swizzled by XOR with the row's
// number modulo 8, as the copy engine writes them; it begins at a multiple of 1024 bytes. Eight rows are an
// atom of 1024 bytes.
//   K-major:  a row is 64 elements of K of one row of A (column of B).
//   MN-major: a row is 64 elements of M (N) for one k; 64 such rows are a block of 8 KiB (or another number
//             of rows, the tile's length along K), and further blocks of 64 elements of N follow.
#pragma once
#include "ptx.cuh"

namespace hopper {

enum Major { K_MAJOR = 0, MN_MAJOR = 1 };

constexpr int ATOM_BYTES = 1024;
constexpr int BLOCK_BYTES = 64 * 128;  // of an MN-major tile: 64 elements by 64 of K

// Descriptor of an operand that begins at `address`. Strides are in units of 16 bytes: between atoms along K
// (MN-major) or along M and N (K-major) at bit 32, between blocks of 64 elements of N (MN-major), of BLOCK
// bytes, at bit 16.
// Bit 62: swizzle of 128 bytes.
template <int MAJOR, int BLOCK = BLOCK_BYTES>
__device__ __forceinline__ unsigned long long descriptor(unsigned address) {
  constexpr unsigned long long leading = MAJOR == MN_MAJOR ? BLOCK >> 4 : 1;
  return (unsigned long long)((address & 0x3ffff) >> 4) | leading << 16 |
         (unsigned long long)(ATOM_BYTES >> 4) << 32 | 1ull << 62;
}

// The same of a K-major operand whose rows have 64 bytes: chunks are swizzled by XOR with half the row's
// number modulo 4, and eight rows are an atom of 512 bytes. Bit 63: swizzle of 64 bytes.
__device__ __forceinline__ unsigned long long descriptor_64(unsigned address) {
  return (unsigned long long)((address & 0x3ffff) >> 4) | 1ull << 16 |
         (unsigned long long)(ATOM_BYTES / 2 >> 4) << 32 | 1ull << 63;
}

// Descriptor of the operand that begins `bytes` behind. Addresses in shared memory are below 2^18, so that
// the sum stays in the low word. The next step's descriptor is then one addition: the conversion of an
// address is a chain of uniform instructions that takes longer than a product of 64 columns.
__device__ __forceinline__ unsigned long long advance(unsigned long long descriptor, unsigned bytes) {
  return (descriptor >> 32 << 32) | ((unsigned)descriptor + (bytes >> 4));
}

// Bytes from one step of 16 along K to the next: 16 elements of a row, or 16 rows.
template <int MAJOR> constexpr int K_STEP_BYTES = MAJOR == K_MAJOR ? 32 : 2 * ATOM_BYTES;

// Position in the 64 x N accumulators of element `i` of a thread's N / 2.
__device__ __forceinline__ int accumulator_row(int thread, int i) {
  return thread / 32 * 16 + thread % 32 / 4 + (i & 2) * 4;
}
__device__ __forceinline__ int accumulator_column(int thread, int i) {
  return i / 4 * 8 + thread % 4 * 2 + (i & 1);
}

}  // namespace hopper
