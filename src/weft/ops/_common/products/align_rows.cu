// y = x, with rows at multiples of 16 bytes: an operand of a product that the copy engine cannot read as it
// is stored.
//
// A vector of 16 bytes of y is cut out of two aligned ones of x (row_view.cuh), so that a row of x may begin
// at any element. Elements of y behind a row's end are 0. Nothing outside of x is read.
#include "numeric.cuh"

using T = WEFT_T;
constexpr int N = Wide<T>::N, THREADS = 256, UNROLL = 4;
#include "row_view.cuh"
#include "wide_store.cuh"

static_assert(sizeof(T) == 2, "half types");

struct AlignArguments {
  const T* x;  // rows at x_pitch elements
  T* y;        // 16-byte aligned; rows of `vectors` vectors
  long long rows, columns, x_pitch, vectors;
};

// A block has UNROLL times THREADS vectors of y, which follow each other.
extern "C" __global__ void __launch_bounds__(THREADS) align_rows(const AlignArguments arguments) {
  const long long first = (long long)blockIdx.x * (THREADS * UNROLL);
  const long long first_row = first / arguments.vectors;
  const unsigned first_vector = (unsigned)(first % arguments.vectors), vectors = (unsigned)arguments.vectors;
  const char* const begin = reinterpret_cast<const char*>(arguments.x);
  const long long last = (arguments.rows - 1) * arguments.x_pitch + arguments.columns;
  const char* const end = reinterpret_cast<const char*>(arguments.x + last);
  uint4 blocks[UNROLL][2] = {};
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const unsigned within = first_vector + threadIdx.x + i * THREADS;
    const long long row = first_row + within / vectors, column = within % vectors * (long long)N;
    if (row >= arguments.rows) continue;
    const T* const from = arguments.x + row * arguments.x_pitch + column;
    const int past = (int)((unsigned long long)from % 16);
    const char* const block = reinterpret_cast<const char*>(from) - past;
    if (block >= begin && block + (past ? 32 : 16) <= end) {
      blocks[i][0] = *reinterpret_cast<const uint4*>(block);
      if (past) blocks[i][1] = *reinterpret_cast<const uint4*>(block + 16);
    } else {  // at the ends of x
      unsigned words[8] = {};
#pragma unroll
      for (int j = 0; j < 2 * N; ++j) {
        const char* const at = block + j * sizeof(T);
        if (at >= begin && at < end)
          words[j / 2] |= (unsigned)*reinterpret_cast<const unsigned short*>(at) << j % 2 * 16;
      }
      blocks[i][0] = make_uint4(words[0], words[1], words[2], words[3]);
      blocks[i][1] = make_uint4(words[4], words[5], words[6], words[7]);
    }
  }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const unsigned within = first_vector + threadIdx.x + i * THREADS;
    const long long row = first_row + within / vectors, column = within % vectors * (long long)N;
    if (row >= arguments.rows) continue;
    const T* const from = arguments.x + row * arguments.x_pitch + column;
    auto v = joined<Vector<T, N>>(blocks[i], 1, (int)((unsigned long long)from % 16));
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (column + j >= arguments.columns) v.at[j] = from_float<T>(0.0f);
    store_pack(arguments.y + (row * arguments.vectors) * N + column, v);
  }
}
