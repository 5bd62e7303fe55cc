// Attention for decoding: a few queries of each sequence over its cached keys, which are read once.
//
// decode_split: a block has 16 MT rows, which are the new tokens' queries of the heads that share one head of
// keys, and SPLIT keys of one sequence. The places where a sequence is cut depend on nothing but the keys'
// numbers, so that the bits of a result do not depend on the batch. Each warp reads every WARPS-th step of 16
// keys into STAGES stages of its own in shared memory, by asynchronous copies: the warps wait for nobody
// until the end, where their results are added up in the order of their numbers. Scores, weights and the
// weighted values of a warp are in registers, in the fragments of mma.m16n8k16.
//
// decode_merge: a block has one row, and adds up what decode_split left of it, in the order of the keys.
//
// Bytes: the visible keys and values, once for each 16 MT rows. Between the kernels: HEAD + 2 floats a row
// and split, 1.6 % of the bytes at four heads a group and HEAD = 128. Sources: flash-decoding (Dao et al.,
// 2023), online softmax (arXiv:1805.02867), paged keys (arXiv:2309.06180).
#include "products/mma_ptx.cuh"
#include "overlap.cuh"

#ifndef HEAD
#define HEAD 128
#define WARPS 4
#define MT 1
#define STAGES 3
#define SPLIT 512
#define PAGED 0
#endif

using T = WEFT_T;

namespace {

// Columns past HEAD are 0. 32 columns are 64 bytes: the swizzle has four chunks of 16 bytes to permute.
constexpr int COLUMNS = (HEAD + 31) / 32 * 32, CHUNKS = COLUMNS / 8, ROW_BYTES = COLUMNS * 2;
constexpr int THREADS = 32 * WARPS, ROWS = 16 * MT;
constexpr int STEP = 16;  // keys: the depth of one product with the values
constexpr int TILE = STEP * ROW_BYTES, STAGE = 2 * TILE;  // bytes: the keys, then the values
// The results of the warps, at the end, in the memory of the stages. Eight floats more in a row put the rows
// of a fragment into different banks.
constexpr int PITCH = COLUMNS + 8;
constexpr int SUMS = WARPS * ROWS * PITCH * 4;  // bytes; tops, totals and weights follow
constexpr int PARTIAL = HEAD + 2;               // floats of a row and split: weighted values, top, total
// A macro: NVRTC has no <limits>, and a constexpr float cannot be made from bits.
#define INFINITE __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ float shared_float(unsigned at) { return __int_as_float((int)shared_word(at)); }

// Byte offset of a chunk of a row. Rows of an odd multiple of four chunks fill the banks by pairs, and their
// pattern changes every second row. Neither copies nor ldmatrix then have bank conflicts.
__device__ __forceinline__ unsigned chunk_offset(int row, int chunk) {
  const int flip = CHUNKS % 8 == 0 ? row & 7 : (row >> 1) & 3;
  return row * ROW_BYTES + ((chunk ^ flip) << 4);
}

// Number of keys of a sequence: its length, clamped to what the cache has room for.
__device__ __forceinline__ int key_count(const int* lengths, int batch, index_t capacity) {
  return max(0, min(lengths[batch], (int)capacity));
}

// The reference of a row's exponentials. A row that sees no key has a top of -inf: -inf - -inf would be NaN.
__device__ __forceinline__ float finite(float top) { return top == -INFINITE ? 0.0f : top; }

template <typename U> __device__ __forceinline__ unsigned pair(U low, U high) {
  const U two[2] = {low, high};
  unsigned word;
  memcpy(&word, two, sizeof(word));
  return word;
}

// Keys and values of one sequence and head, in steps of 16 keys of which a warp reads every WARPS-th.
struct KeyStream {
  const T *k, *v;
  const int* table;  // the sequence's pages; not read unless PAGED
  index_t k_page, v_page, k_row, v_row;
  int pages, steps_a_page, first_step, keys;
  unsigned buffer;

  // First key of the warp's step i.
  __device__ __forceinline__ int start(int i) const { return (first_step + i * WARPS) * STEP; }

  // Page of the warp's step i: a page has whole steps. -1 past the end.
  __device__ __forceinline__ int page(int i, int count) const {
    if (!PAGED) return 0;
    return i < count ? table[(first_step + i * WARPS) / steps_a_page] : -1;
  }

  // Ask for the warp's step i. Rows past the sequence's end are 0 and are not read, and neither is a page
  // that does not exist.
  __device__ __forceinline__ void load(int i, int page) const {
    const unsigned to = buffer + i % STAGES * STAGE;
    const int key = start(i);
    const int rows = PAGED && (page < 0 || page >= pages) ? 0 : keys - key;
    const index_t row = PAGED ? key % (steps_a_page * STEP) : key;
    const T* from_k = k + (PAGED ? page * k_page : 0) + row * k_row;
    const T* from_v = v + (PAGED ? page * v_page : 0) + row * v_row;
#pragma unroll
    for (int j = 0; j < STEP * CHUNKS / 32; ++j) {
      const int item = j * 32 + lane_id(), r = item / CHUNKS, chunk = item % CHUNKS;
      const bool valid = r < rows && chunk < HEAD / 8;
      const unsigned at = to + chunk_offset(r, chunk);
      copy_async(at, valid ? from_k + r * k_row + chunk * 8 : k, valid ? 16 : 0);
      copy_async(at + TILE, valid ? from_v + r * v_row + chunk * 8 : v, valid ? 16 : 0);
    }
  }
};

// Running state of online softmax: rows lane / 4 and lane / 4 + 8 of each 16. A total covers a lane's own
// keys until the end.
struct RowState {
  float acc[MT][COLUMNS / 8][4] = {};
  float top[MT][2], total[MT][2];
  int limit[MT][2];  // keys that the row sees

  __device__ __forceinline__ void attend(const unsigned (&q)[MT][COLUMNS / 16][4], unsigned tile, int key,
                                         float scale) {
    const int lane = lane_id();
    float s[MT][2][4] = {};
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; ++i) {
      unsigned b[4];
      ldmatrix_x4<false>(b, tile + chunk_offset((lane >> 4) * 8 + lane % 8, 2 * i + (lane >> 3 & 1)));
#pragma unroll
      for (int y = 0; y < MT; ++y) {
        multiply<T>(s[y][0], q[y][i], b[0], b[1]);
        multiply<T>(s[y][1], q[y][i], b[2], b[3]);
      }
    }
    unsigned p[MT][4];
#pragma unroll
    for (int y = 0; y < MT; ++y)
#pragma unroll
      for (int h = 0; h < 2; ++h) weigh(s[y], p[y], y, h, key + lane % 4 * 2, scale);
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; ++i) {
      unsigned b[4];
      ldmatrix_x4<true>(b, tile + TILE +
                               chunk_offset((lane >> 3 & 1) * 8 + lane % 8, 2 * i + (lane >> 4)));
#pragma unroll
      for (int y = 0; y < MT; ++y) {
        multiply<T>(acc[y][2 * i], p[y], b[0], b[1]);
        multiply<T>(acc[y][2 * i + 1], p[y], b[2], b[3]);
      }
    }
  }

  // Turn the scores of one row into weights, and scale what was added up before to the new top. `key` is the
  // lane's first: a lane has keys 0, 1, 8 and 9 from there.
  __device__ __forceinline__ void weigh(float (&s)[2][4], unsigned (&p)[4], int y, int h, int key,
                                        float scale) {
    float most = top[y][h];
#pragma unroll
    for (int x = 0; x < 2; ++x)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = s[x][2 * h + e];
        score = key + x * 8 + e < limit[y][h] ? score * scale : -INFINITE;
        most = fmaxf(most, score);  // drops a NaN, which reaches the total by its weight
      }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const float base = finite(most), shrink = exp2f(top[y][h] - base);
    top[y][h] = most;
    total[y][h] *= shrink;
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const float low = exp2f(s[x][2 * h] - base), high = exp2f(s[x][2 * h + 1] - base);
      total[y][h] += low + high;  // the weights before they are rounded
      p[2 * x + h] = pair(from_float<T>(low), from_float<T>(high));
    }
#pragma unroll
    for (int x = 0; x < COLUMNS / 8; ++x) acc[y][x][2 * h] *= shrink, acc[y][x][2 * h + 1] *= shrink;
  }

  // Leave the warp's sums in shared memory. `broken`: a page does not exist.
  __device__ __forceinline__ void leave(unsigned shared, bool broken) {
    const int lane = lane_id(), warp = threadIdx.x / 32;
#pragma unroll
    for (int y = 0; y < MT; ++y)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = total[y][h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const int row = warp * ROWS + y * 16 + h * 8 + lane / 4;
#pragma unroll
        for (int x = 0; x < COLUMNS / 8; ++x)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            shared_store(shared + (row * PITCH + x * 8 + lane % 4 * 2 + e) * 4, acc[y][x][2 * h + e]);
        if (lane % 4 == 0) {
          shared_store(shared + SUMS + row * 8, top[y][h]);
          shared_store(shared + SUMS + row * 8 + 4, broken ? NOT_A_NUMBER : sum);
        }
      }
  }
};

// Add up the warps' tops and totals of each row. Afterwards a warp's total is the factor of its sums, and
// the tops and totals of the rows are behind those of the warps.
__device__ __forceinline__ void merge_warps(unsigned shared) {
  const int row = threadIdx.x;
  if (row >= ROWS) return;
  float top = -INFINITE, total = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) top = fmaxf(top, shared_float(shared + SUMS + (w * ROWS + row) * 8));
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const unsigned at = shared + SUMS + (w * ROWS + row) * 8;
    const float factor = exp2f(shared_float(at) - finite(top));
    total = fmaf(shared_float(at + 4), factor, total);
    shared_store(at + 4, factor);
  }
  shared_store(shared + SUMS + (WARPS * ROWS + row) * 8, top);
  shared_store(shared + SUMS + (WARPS * ROWS + row) * 8 + 4, total);
}

}  // namespace

// q: (B, tokens, kv_heads group, HEAD) by strides in elements, with adjacent columns; k, v: (B, kv_heads,
// capacity, HEAD), or pages (pages, kv_heads, page_size, HEAD) if PAGED, by strides, every row 16-byte
// aligned; lengths: (B,); table: (B, max_pages); out: as q, contiguous; partials: (B, kv_heads, splits,
// tokens group, HEAD + 2) floats, not used with one split. Grid: (splits, kv_heads tiles of rows, B). Dynamic
// shared memory: the larger of WARPS STAGES STAGE and SUMS + 8 ROWS (WARPS + 1).
extern "C" __global__ void __launch_bounds__(THREADS)
decode_split(const T* q, const T* k, const T* v, const int* lengths, const int* table, T* out,
             float* partials, index_t tokens, index_t kv_heads, index_t group, index_t capacity,
             index_t pages, index_t page_size, index_t max_pages, index_t q_batch, index_t q_token,
             index_t q_head, index_t k_batch, index_t k_head, index_t k_row, index_t v_batch,
             index_t v_head, index_t v_row, double scale_log2) {
  extern __shared__ __align__(128) unsigned char pool[];
  const unsigned shared = shared_address(pool);
  const int split = blockIdx.x, batch = blockIdx.z, lane = lane_id(), warp = threadIdx.x / 32;
  const int kv_head = blockIdx.y % (int)kv_heads, tile = blockIdx.y / (int)kv_heads;
  const int rows = (int)(tokens * group), first_row = tile * ROWS;
  const int keys = key_count(lengths, batch, capacity), begin = split * SPLIT;
  const bool is_alone = gridDim.x == 1;
  // Nothing reads the partial result of a split without keys. A split that is alone writes 0.
  if (begin >= keys && !is_alone) return;
  const int end = min(keys, begin + SPLIT), steps = max(0, end - begin + STEP - 1) / STEP;
  const int count = warp < steps ? (steps - warp - 1) / WARPS + 1 : 0;  // of the warp

  const KeyStream stream = {
      k + kv_head * k_head + (PAGED ? 0 : batch * k_batch),
      v + kv_head * v_head + (PAGED ? 0 : batch * v_batch),
      table + batch * max_pages, k_batch, v_batch, k_row, v_row, (int)pages, (int)page_size / STEP,
      begin / STEP + warp, end, shared + warp * STAGES * STAGE};
  bool broken = false;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < count) {
      const int page = stream.page(i, count);
      broken |= PAGED && (page < 0 || page >= (int)pages);
      stream.load(i, page);
    }
    copies_commit();
  }

  // The rows of the first factor: packed by token and then by head. Rows past the last are 0 and see no key.
  unsigned fragments[MT][COLUMNS / 16][4];
  RowState state;
#pragma unroll
  for (int y = 0; y < MT; ++y)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + y * 16 + h * 8 + lane / 4, token = row / (int)group;
      const bool exists = row < rows;
      const T* from = q + batch * q_batch + token * q_token +
                      (kv_head * group + row % (int)group) * q_head + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < COLUMNS / 8; ++i) {
        unsigned word = 0;
        if (exists && i < HEAD / 8) memcpy(&word, reinterpret_cast<const unsigned*>(from + i * 8), 4);
        fragments[y][i / 2][i % 2 * 2 + h] = word;
      }
      state.limit[y][h] = exists ? keys - ((int)tokens - 1 - token) : 0;
      state.top[y][h] = -INFINITE, state.total[y][h] = 0.0f;
    }

  int next = stream.page(STAGES - 1, count);  // read one step before its copies need it
  for (int i = 0; i < count; ++i) {
    copies_wait<STAGES - 2>();
    // All lanes' copies of this stage have arrived, and all lanes have read the stage that is filled next.
    __syncwarp();
    if (i + STAGES - 1 < count) {
      broken |= PAGED && (next < 0 || next >= (int)pages);
      stream.load(i + STAGES - 1, next);
    }
    copies_commit();
    next = stream.page(i + STAGES, count);
    state.attend(fragments, stream.buffer + i % STAGES * STAGE, stream.start(i), (float)scale_log2);
  }
  copies_wait<0>();
  launch_dependents();
  __syncthreads();  // no warp reads its stages any more: their memory takes the sums
  state.leave(shared, broken);
  __syncthreads();
  merge_warps(shared);
  __syncthreads();
  const int own_rows = min(ROWS, rows - first_row);
  for (int item = threadIdx.x; item < own_rows * HEAD; item += THREADS) {
    const int r = item / HEAD, column = item % HEAD, row = first_row + r;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
      sum = fmaf(shared_float(shared + ((w * ROWS + r) * PITCH + column) * 4),
                 shared_float(shared + SUMS + (w * ROWS + r) * 8 + 4), sum);
    const unsigned of_row = shared + SUMS + (WARPS * ROWS + r) * 8;
    const float top = shared_float(of_row), total = shared_float(of_row + 4);
    if (is_alone) {
      const int token = row / (int)group, head = kv_head * (int)group + row % (int)group;
      const bool sees = keys > (int)tokens - 1 - token;
      out[((batch * tokens + token) * kv_heads * group + head) * HEAD + column] =
          from_float<T>(sees ? sum / total : 0.0f);
    } else {
      float* to = partials + (((batch * kv_heads + kv_head) * gridDim.x + split) * rows + row) * PARTIAL;
      to[column] = sum;
      if (column == 0) to[HEAD] = top, to[HEAD + 1] = total;
    }
  }
}

// partials, lengths and out as above; `splits` is the number of splits that the first kernel had. Grid: one
// block for each row of (B, tokens, kv_heads group). Block: COLUMNS threads.
extern "C" __global__ void __launch_bounds__(COLUMNS)
decode_merge(const float* partials, const int* lengths, T* out, index_t tokens, index_t kv_heads,
             index_t group, index_t capacity, index_t splits) {
  wait_for_previous_kernel();
  const int column = threadIdx.x, heads = (int)(kv_heads * group);
  const int head = blockIdx.x % heads, token = blockIdx.x / heads % (int)tokens;
  const index_t batch = blockIdx.x / heads / (int)tokens;
  const int keys = key_count(lengths, (int)batch, capacity), count = (keys + SPLIT - 1) / SPLIT;
  const index_t rows = tokens * group, row = token * group + head % (int)group;
  const index_t step = rows * PARTIAL;
  const float* from =
      partials + (((batch * kv_heads + head / (int)group) * splits) * rows + row) * PARTIAL;
  if (column >= HEAD) return;
  float top = -INFINITE, sum = 0.0f, total = 0.0f;
#pragma unroll 4
  for (int i = 0; i < count; ++i) top = fmaxf(top, from[i * step + HEAD]);
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const float factor = exp2f(from[i * step + HEAD] - finite(top));
    sum = fmaf(from[i * step + column], factor, sum);
    total = fmaf(from[i * step + HEAD + 1], factor, total);
  }
  const bool sees = keys > (int)tokens - 1 - token;
  out[(index_t)blockIdx.x * HEAD + column] = from_float<T>(sees ? sum / total : 0.0f);
}
