// The end of a tile of wgmma.cu: a warp group's sums become elements of c, through buffers in shared memory
// and the copy engine, or partial sums in float32. Included by wgmma.cu alone, behind its constants.
#pragma once
#include "epilogue.cuh"

namespace {

// Stores a word of two elements of c, of which `left` are in the row: with ANY_C at any element.
__device__ __forceinline__ void store_pair(T* to, unsigned word, int left) {
  if (!ANY_C || (left > 1 && (unsigned long long)to % 4 == 0)) {
    *reinterpret_cast<unsigned*>(to) = word;
  } else {
    const Vector<T, 2> two = as_pair(word);
    if (left > 0) to[0] = two.at[0];
    if (left > 1) to[1] = two.at[1];
  }
}

// The epilogue of a consumer group: what it needs beside the sums.
struct Output {
  const MatmulArguments& arguments;
  int group;
  unsigned buffer, barrier;    // in shared memory: where the group's boxes are, and the residual's barrier
  unsigned residual_parity = 0;

  __device__ __forceinline__ bool is_issuer() const { return threadIdx.x % GROUP_THREADS == 0; }

  // With ACCUMULATE c is added to, but by the first product, and rounded only by the last.
  __device__ __forceinline__ bool needs_extra() const {
    return EPILOGUE != ACCUMULATE || (arguments.phase & ADDS);
  }

  // Waits until the issuing thread's copies have read the buffer; then everyone may overwrite it.
  __device__ __forceinline__ void wait_for_buffer() const {
    if (is_issuer()) tma_wait_read<0>();
    named_barrier(1 + group, GROUP_THREADS);
  }

  // Lets the copy engine bring a part of the residual, pre-activation or c into the buffer.
  __device__ __forceinline__ void load_residual(int row, int column) const {
    if (!is_issuer()) return;
    tma_wait_read<0>();
    mbarrier_arrive_expect(barrier, BOXES * BOX_BYTES);
#pragma unroll
    for (int box = 0; box < BOXES; ++box)
      tma_load(buffer + box * BOX_BYTES, &arguments.extra, column + box * BOX_COLUMNS, row, barrier);
  }

  // Stores 64 x BN sums as elements of c from (row, column) on. The residual (pre-activation) of the first
  // part is on its way.
  __device__ __forceinline__ void store(const float (&sums)[BN / 2], int row, int column) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int first = column + part * BOXES * BOX_COLUMNS;
      if constexpr (sizeof(T) == 4) write_floats(sums, part);
      else write_matrices(sums, part, row, first);
      fence_async_proxy();
      named_barrier(1 + group, GROUP_THREADS);
      if constexpr (ANY_C) {
        store_elements(arguments.c_elements, buffer, BOXES, row, first);
        if constexpr (EPILOGUE == GELU_PRE)
          store_elements(arguments.extra_elements, buffer + BOX_BYTES, 1, row, first);
        // Before the copy engine brings the next part of a residual.
        if constexpr (LOADS_EXTRA) named_barrier(1 + group, GROUP_THREADS);
      } else if (is_issuer()) {
#pragma unroll
        for (int box = 0; box < BOXES; ++box)
          tma_store(&arguments.c, buffer + box * BOX_BYTES, first + box * BOX_COLUMNS, row);
        if constexpr (EPILOGUE == GELU_PRE) tma_store(&arguments.extra, buffer + BOX_BYTES, first, row);
        tma_commit();
      }
    }
  }

  // Stores `boxes` boxes of the buffer from (row, first) on in a matrix whose rows follow each other and
  // begin at any element: two elements of a lane, in one access where a row begins at a multiple of 4 bytes.
  __device__ __forceinline__ void store_elements(T* matrix, unsigned from, int boxes, int row,
                                                 int first) const {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x % GROUP_THREADS / 32 * 16;
#pragma unroll 4
    for (int in_box = first_row; in_box < first_row + 16; ++in_box) {
      if (row + in_box >= arguments.rows) break;
      const long long begin = (long long)(row + in_box) * arguments.columns;
      for (int box = 0; box < boxes; ++box) {
        const int left = arguments.columns - first - box * BOX_COLUMNS - lane * 2;
        const unsigned at = from + box * BOX_BYTES + in_box * 128 + ((lane / 4 ^ (in_box & 7)) * 16);
        store_pair(matrix + begin + first + box * BOX_COLUMNS + lane * 2, load_word(at + lane % 4 * 4), left);
      }
    }
  }

  // Waits until the buffer may be overwritten, or has the residual.
  __device__ __forceinline__ void prepare_buffer(int part, int row, int first) {
    if (LOADS_EXTRA && needs_extra()) {
      if (part > 0) load_residual(row, first);
      wait(barrier, residual_parity);
      residual_parity ^= 1;
    } else {
      wait_for_buffer();
    }
  }

  // Writes a part of c, from column `first` on, to the buffer.
  __device__ __forceinline__ void write_matrices(const float (&sums)[BN / 2], int part, int row, int first) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % GROUP_THREADS / 32;
    // Lane l gives the address of row l % 16 of the warp's 16, in column 8 (l / 16) of each 16.
    const int matrix_row = warp * 16 + lane % 16;
    Vector<T, 2> bias[BOXES * BOX_COLUMNS / 8];
    float column_sums[BOXES * BOX_COLUMNS / 4];  // two of each 8 columns, with SLOPE
    unsigned low[BOXES * 8];  // bytes of the thread's sums, with ACCUMULATE
    if constexpr (EPILOGUE == ACCUMULATE) load_low(low, row, first);
    if constexpr (HAS_BIAS) load_bias(bias, arguments.bias + first, arguments.columns - first);
    prepare_buffer(part, row, first);
#pragma unroll
    for (int box = 0; box < BOXES; ++box) {
#pragma unroll
      for (int pair = 0; pair < BOX_COLUMNS / 16; ++pair) {
        const int in_part = box * BOX_COLUMNS + pair * 16;  // column
        const int i = (part * BOXES * BOX_COLUMNS + in_part) / 2;  // of the thread's sums
        unsigned words[4], pre_words[4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          float two[2] = {sums[i + word * 2], sums[i + word * 2 + 1]};
          unsigned extra = 0;
          if constexpr (HAS_BIAS) add(two, bias[in_part / 8 + word / 2]);
          if constexpr (LOADS_EXTRA) {
            const int residual_row = warp * 16 + lane / 4 + word % 2 * 8;
            const int chunk = (pair * 2 + word / 2) ^ (residual_row & 7);
            extra = load_word(buffer + box * BOX_BYTES + residual_row * 128 + chunk * 16 + lane % 4 * 4);
          }
          if constexpr (EPILOGUE == RESIDUAL) add(two, as_pair(extra));
          if constexpr (EPILOGUE == SLOPE) {
            multiply_by_slopes(two, as_pair(extra));
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              float& sum = column_sums[in_part / 4 + word / 2 * 2 + j];
              sum = word % 2 ? sum + two[j] : two[j];
            }
          }
          if constexpr (EPILOGUE == GELU_PRE) pre_words[word] = rounded(two);
          if constexpr (EPILOGUE == GELU || EPILOGUE == GELU_PRE) activate(two);
          if constexpr (EPILOGUE == ACCUMULATE)
            words[word] = accumulated(two, extra, low[in_part / 8 + word / 2], word % 2 * 16);
          else words[word] = rounded(two);
        }
        const int chunk = (pair * 2 + lane / 16) ^ (matrix_row & 7);
        const unsigned to = buffer + box * BOX_BYTES + matrix_row * 128 + chunk * 16;
        store_matrices(to, words[0], words[1], words[2], words[3]);
        if constexpr (EPILOGUE == GELU_PRE)
          store_matrices(to + BOX_BYTES, pre_words[0], pre_words[1], pre_words[2], pre_words[3]);
      }
    }
    if constexpr (EPILOGUE == SLOPE) store_column_sums(column_sums, row, first);
    if constexpr (EPILOGUE == ACCUMULATE) store_low(low, row, first);
  }

  // Stores the sums of a warp's 16 rows for a part of c: (rows / 16, columns) float32 in `partials`.
  template <int COUNT>
  __device__ __forceinline__ void store_column_sums(float (&sums)[COUNT], int row, int first) const {
    const int index = row / 16 + threadIdx.x % GROUP_THREADS / 32;
    add_over_rows(sums);
#pragma unroll
    for (int i = 0; i < COUNT / 8; i += 2) {
      const int column = first + (first_of_lane<COUNT>() + i) / 2 * 8 + threadIdx.x % 4 * 2;
      if (index * 16 < arguments.rows && column < arguments.columns)
        *reinterpret_cast<Vector<float, 2>*>(arguments.partials + (long long)index * arguments.columns +
                                             column) = {sums[i], sums[i + 1]};
    }
  }

  // The lower bytes of a part of c (Sum24) are in an order of their own: 16 bytes of each thread of a group.
  // Parts outside of c have none.
  __device__ __forceinline__ unsigned* low_at(int row, int first) const {
    constexpr int WIDTH = BOXES * BOX_COLUMNS;
    const long long part = (long long)(row / 64) * ((arguments.columns + WIDTH - 1) / WIDTH) + first / WIDTH;
    return reinterpret_cast<unsigned*>(arguments.partials) + part * (64 * WIDTH / 4) +
           threadIdx.x % GROUP_THREADS * 4;
  }
  __device__ __forceinline__ void load_low(unsigned (&low)[BOXES * 8], int row, int first) const {
#pragma unroll
    for (int i = 0; i < BOXES * 8; ++i) low[i] = 0;
    if (!(arguments.phase & ADDS) || row >= arguments.rows || first >= arguments.columns) return;
#pragma unroll
    for (int i = 0; i < BOXES * 8; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(low_at(row, first) + i * GROUP_THREADS);
      low[i] = four.x, low[i + 1] = four.y, low[i + 2] = four.z, low[i + 3] = four.w;
    }
  }
  __device__ __forceinline__ void store_low(const unsigned (&low)[BOXES * 8], int row, int first) const {
    if ((arguments.phase & ROUNDS) || row >= arguments.rows || first >= arguments.columns) return;
#pragma unroll
    for (int i = 0; i < BOXES * 8; i += 4)
      *reinterpret_cast<uint4*>(low_at(row, first) + i * GROUP_THREADS) =
          make_uint4(low[i], low[i + 1], low[i + 2], low[i + 3]);
  }

  // Returns the word of c for two sums, which are added to its old word `upper`, and replaces their bytes.
  __device__ __forceinline__ unsigned accumulated(float (&two)[2], unsigned upper, unsigned& low,
                                                  int shift) const {
    // Without a load the buffer has another tile.
    Sum24{arguments.phase & ADDS ? upper : 0, low >> shift & 0xffff}.add_to(two);
    const Sum24 sum = Sum24::of(two);
    low = low & ~(0xffffu << shift) | sum.lower << shift;
    return arguments.phase & ROUNDS ? rounded(two) : sum.upper;
  }

  // With EXPONENTIAL: sums become exp(sums - the row's number), 0 where that is +inf. The largest sum and the
  // total of the exponentials in this tile are stored for each row: (rows, column tiles) of two float32. A
  // sum far above its row's number is reported.
  __device__ __forceinline__ void exponentiate(float (&sums)[BN / 2], int row, int column) const {
    const int thread = threadIdx.x % GROUP_THREADS;
    if (column + BN > arguments.columns) {  // a column beyond the last has a sum of 0
#pragma unroll
      for (int i = 0; i < BN / 2; ++i)
        if (column + accumulator_column(thread, i) >= arguments.columns) sums[i] = -infinity();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own_row = row + accumulator_row(thread, half * 2);
      const float reference = own_row < arguments.rows ? arguments.row_values[own_row] : infinity();
      const float scaled = reference * LOG2E;
      float top = -infinity(), total = 0.0f;
#pragma unroll
      for (int j = 0; j < BN / 4; ++j) {
        float& value = sums[j / 2 * 4 + half * 2 + j % 2];
        top = fmaxf(top, value);
        const float power = power_of_2(fmaf(value, LOG2E, -scaled));
        value = reference == infinity() ? 0.0f : power;
        total += value;
      }
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        total += __shfl_xor_sync(~0u, total, step);
      }
      const int tiles = (arguments.columns + BN - 1) / BN;
      if (thread % 4 == 0 && own_row < arguments.rows && column < arguments.columns)
        *reinterpret_cast<Vector<float, 2>*>(
            arguments.partials + ((long long)own_row * tiles + column / BN) * 2) = {top, total};
      // Many threads may store the same 1. An ignored row has a number of +inf: nothing is above it.
      if (arguments.farthest > 0.0f && top - reference > arguments.farthest) *arguments.condition = 1;
    }
  }

  // With ROW_SCALE: sums are multiplied by their row's number.
  __device__ __forceinline__ void scale_rows(float (&sums)[BN / 2], int row) const {
    const int thread = threadIdx.x % GROUP_THREADS;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own_row = row + accumulator_row(thread, half * 2);
      const float factor = own_row < arguments.rows ? arguments.row_values[own_row] : 0.0f;
#pragma unroll
      for (int j = 0; j < BN / 4; ++j) sums[j / 2 * 4 + half * 2 + j % 2] *= factor;
    }
  }

  // The same for float32, two columns at a time. Two rows that differ in one place are written 16 columns
  // apart at a time: their swizzled chunks of a column are in the same banks.
  __device__ __forceinline__ void write_floats(const float (&sums)[BN / 2], int part) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % GROUP_THREADS / 32, swap = lane / 4 % 2;
    wait_for_buffer();
#pragma unroll
    for (int i = 0; i < BOXES * BOX_COLUMNS / 2; i += i % 8 == 6 ? 10 : 2) {  // of 16 in 32 columns
      const int first = part * BOXES * BOX_COLUMNS / 2 + i;
      const int box_row = warp * 16 + lane / 4 + i % 4 / 2 * 8;
#pragma unroll
      for (int time = 0; time < 2; ++time) {
        const bool second = time != swap;
        const int chunk = (i % 16 / 4 * 2 + lane % 4 / 2 + second * 4) ^ (box_row & 7);
        store_words(buffer + i / 16 * BOX_BYTES + box_row * 128 + chunk * 16 + lane % 2 * 8,
                    __float_as_uint(second ? sums[first + 8] : sums[first]),
                    __float_as_uint(second ? sums[first + 9] : sums[first + 1]));
      }
    }
  }

};

// Stores epilogue(two) of a divided K in (row, column) and the next column of c, without the buffers.
__device__ __forceinline__ void store_sums(const MatmulSumArguments& arguments, float (&two)[2], int row,
                                           int column) {
  const long long at = (long long)row * arguments.columns + column;
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<Vector<float, 2>*>(arguments.c + at) = {two[0], two[1]};
    return;
  }
  if constexpr (HAS_BIAS) add(two, *reinterpret_cast<const Vector<T, 2>*>(arguments.bias + column));
  if constexpr (EPILOGUE == ROW_SCALE) {
    two[0] *= arguments.row_values[row];
    two[1] *= arguments.row_values[row];
  }
  if constexpr (EPILOGUE == RESIDUAL)
    add(two, *reinterpret_cast<const Vector<T, 2>*>(arguments.extra + row * arguments.extra_pitch + column));
  const int left = arguments.columns - column;
  if constexpr (EPILOGUE == GELU_PRE) store_pair(arguments.extra + at, rounded(two), left);
  if constexpr (EPILOGUE == GELU || EPILOGUE == GELU_PRE) activate(two);
  store_pair(arguments.c + at, rounded(two), left);
}

constexpr int VECTORS = BN / 8;  // of 4 sums, of a thread

// Address of a thread's first vector of sums for 64 rows of a tile; the next is GROUP_THREADS vectors on.
template <typename Partials>
__device__ __forceinline__ auto partial_at(Partials partials, int partial, int rows_of_tile, int thread) {
  const long long vectors = ((long long)partial * CONSUMERS + rows_of_tile) * VECTORS;
  return partials + (vectors * GROUP_THREADS + thread) * 4;
}

// Stores the sums of 64 rows of a tile in float32, unless they are outside of c.
__device__ __forceinline__ void store_partial(const float (&sums)[BN / 2], const MatmulArguments& arguments,
                                              const Unit& unit, int rows_of_tile) {
  const int thread = threadIdx.x % GROUP_THREADS;
  if (unit.row + rows_of_tile * 64 >= arguments.rows) return;
  float* const to = partial_at(arguments.partials, unit.partial, rows_of_tile, thread);
#pragma unroll
  for (int vector = 0; vector < VECTORS; ++vector)
    *reinterpret_cast<Vector<float, 4>*>(to + vector * GROUP_THREADS * 4) = {
        sums[vector * 4], sums[vector * 4 + 1], sums[vector * 4 + 2], sums[vector * 4 + 3]};
}

}  // namespace
