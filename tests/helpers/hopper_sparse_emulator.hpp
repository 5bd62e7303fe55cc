// The sparse tensor cores on a CPU (ops/_common/hopper/wgmma_sparse_shapes.cuh), beside hopper_emulator.hpp.
//
// The places of A's elements come from registers, in the layout of the PTX ISA for m64nNk32: of each four
// lanes two hold words, by the selector; the lower 16 bits are row l / 4 of the warp's 16, the upper ones row
// l / 4 + 8; the first lane has K 0 to 15, the second K 16 to 31. A product reads the registers when it is
// issued, and they are NaN to their thread until it was waited for. Places that are equal or not in order are
// refused.
#include "hopper_emulator.hpp"

namespace hopper {

template <typename T, int WIDTH, int SELECTOR> struct WgmmaSparse {
  static_assert(SELECTOR == 0 || SELECTOR == 1, "a selector names one of two pairs of lanes");

  static void multiply(const Product& p, float* sums) {
    const unsigned thread = current % 128;
    float a[2][16];
    int at[2][16];  // K of each element
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < 16; ++i) {
        a[half][i] = operand<T, false>(p.a, thread / 32 * 16 + thread % 32 / 4 + half * 8, i);
        const int group = i / 2;  // of four: eight in 32 of K
        const unsigned word = p.factor[2 * SELECTOR + group / 4][0];
        const unsigned code = word >> (half * 16 + group % 4 * 4) & 15;
        require((code & 3) < code >> 2, "two places of a group that are not in order");
        at[half][i] = group * 4 + (i % 2 ? code >> 2 : code & 3);
      }
    for (int i = 0; i < WIDTH / 2; i += i % 2 ? 3 : 1) {  // two columns, each in two rows
      float b[32];
      for (int k = 0; k < 32; ++k) b[k] = operand<T, false>(p.b, i / 4 * 8 + thread % 4 * 2 + i % 2, k);
      for (int half = 0; half < 2; ++half) {
        float& sum = sums[i + half * 2];
        if (!p.accumulate) sum = 0;
        for (int j = 0; j < 16; ++j) sum = fmaf(a[half][j], b[at[half][j]], sum);
      }
    }
  }

  static void run(float (&d)[WIDTH / 2], unsigned long long a, unsigned long long b, const unsigned& codes,
                  int accumulate) {
    Fiber& fiber = fibers[current];
    begin_product(d, WIDTH / 2);
    const Lane* lanes = begin_factor(const_cast<unsigned*>(&codes), 1);
    Product product = {multiply, d, a, b, accumulate != 0, fiber.product_group};
    for (int lane = 0; lane < 4; ++lane) product.factor[lane][0] = lanes[lane].words[0];
    fiber.products.push_back(product);
  }
};

// A lane's word has row l / 4 and columns 2 (l % 4) and the next of each matrix; stored are its columns.
inline void store_matrices_transposed(unsigned to, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  const unsigned lane = current % 32;
  shared_at(to, 16);
  const Lane* lanes = together({.at = to, .words = {r0, r1, r2, r3}});
  for (int matrix = 0; matrix < 4; ++matrix)
    for (int i = 0; i < 2; ++i) {
      const unsigned short element = lanes[lane].words[matrix] >> 16 * i;
      std::memcpy(pool() + lanes[matrix * 8 + lane % 4 * 2 + i].at + lane / 4 * 2, &element, 2);
    }
  writers[block()][to / 16] = {(int)current, fibers[current].proxy_fences};
  __syncwarp();
}

}  // namespace hopper
