// Sparse matrix (CSR) times dense matrix by the merge path, with the fixed orders of spmv.cu.
//
// A block has a tile of TILE places of the merge path (sparse.cuh) and a slice of LANES x VEC_WIDTH columns
// of b. Nonzeros and row ends of the tile go to shared memory. Groups of LANES neighbouring lanes have SHARE
// places each, and walk along them: for each nonzero a group reads one contiguous piece of a row of b, four
// rows in flight. Sums of rows that cross groups meet in shared memory, those of rows that cross tiles in
// `heads` and `tails`, which spmm_carry adds.
//
// Bytes: the matrix once for each slice, y once; each nonzero reads a piece of b, from the caches where b
// fits. A tile leaves two rows of sums.
#include "sparse.cuh"
#include "wide_store.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#ifndef LANES
#define LANES 16  // of a group: a power of two from 4 to 32
#endif
#ifndef SHARE
#define SHARE 32  // places of a group
#endif

constexpr int VEC = VEC_WIDTH;
constexpr int GROUPS = THREADS / LANES;
constexpr int TILE = GROUPS * SHARE;
constexpr int WARPS = THREADS / 32;
constexpr int FLIGHT = 4;  // rows of b that a group loads before it adds the first
typedef Vector<WEFT_T, VEC> Pack;
struct Sums { acc_t at[VEC]; };

__device__ __forceinline__ void add_product(Sums& sums, acc_t value, const Pack& pack) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    if constexpr (sizeof(WEFT_T) == 8) sums.at[j] += value * widen(pack.at[j]);
    else sums.at[j] += value * element(pack, j);
  }
}
__device__ __forceinline__ void add(Sums& sums, const acc_t* more) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) sums.at[j] += more[j];
}
__device__ __forceinline__ void store(WEFT_T* to, const Sums& sums) {
  Pack pack;
#pragma unroll
  for (int j = 0; j < VEC; ++j) pack.at[j] = narrow<WEFT_T>(sums.at[j]);
  store_pack(to, pack);
}
__device__ __forceinline__ void keep(acc_t* to, const Sums& sums) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) to[j] = sums.at[j];
}

// Adds nonzeros [from, to) of the tile to `sums`; b points to the lane's first column. A column out of range
// is never used as an address: its value counts as NaN, in a row of b that exists.
__device__ __forceinline__ void add_nonzeros(Sums& sums, const int* rows_of_b, const acc_t* values,
                                             const WEFT_T* __restrict__ b, index_t k, int from, int to) {
  int at = from;
  for (; at + FLIGHT <= to; at += FLIGHT) {
    Pack packs[FLIGHT];
#pragma unroll
    for (int i = 0; i < FLIGHT; ++i) packs[i] = *reinterpret_cast<const Pack*>(b + rows_of_b[at + i] * k);
#pragma unroll
    for (int i = 0; i < FLIGHT; ++i) add_product(sums, values[at + i], packs[i]);
  }
  for (; at < to; ++at)
    add_product(sums, values[at], *reinterpret_cast<const Pack*>(b + rows_of_b[at] * k));
}

// values, columns: (nonzeros,); offsets: (rows + 1,); b: (b_rows, k) with rows aligned for VEC elements;
// y: (rows, k); first_rows: (tiles + 1,), the row of each tile's first place; heads, tails: (tiles, k). A
// block for each slice of each tile.
extern "C" __global__ void __launch_bounds__(THREADS)
spmm_merge(const WEFT_T* __restrict__ values, const int* __restrict__ columns,
           const offset_t* __restrict__ offsets, const WEFT_T* __restrict__ b, WEFT_T* __restrict__ y,
           index_t* __restrict__ first_rows, acc_t* __restrict__ heads, acc_t* __restrict__ tails,
           index_t rows, index_t nonzeros, index_t b_rows, index_t k, index_t slices) {
  __shared__ int ends[TILE];
  __shared__ int tile_columns[TILE];
  __shared__ acc_t tile_values[TILE];
  __shared__ acc_t group_tails[THREADS * VEC];
  __shared__ int any_ended[GROUPS];
  __shared__ index_t limits[2];
  const index_t tile = blockIdx.x / slices, slice = blockIdx.x % slices, places = rows + nonzeros;
  const int thread = threadIdx.x, warp = thread / 32, group = thread / LANES;
  const index_t start = tile * TILE, stop = start + TILE < places ? start + TILE : places;
  if (warp < 2) {
    const index_t row = rows_before(offsets, warp ? stop : start, rows, nonzeros);
    if (thread % 32 == 0) limits[warp] = row;
  }
  __syncthreads();
  // Offsets that fall could make these negative: the clamps keep every access inside the arrays.
  const int length = (int)(stop - start);
  const index_t first_row = limits[0], first = start - first_row, spanned = limits[1] - first_row;
  const int tile_rows = (int)(spanned < 0 ? 0 : spanned > length ? length : spanned);
  const int count = length - tile_rows;
  for (int r = thread; r < tile_rows; r += THREADS) {
    const index_t end = (index_t)offsets[first_row + r + 1] - first;
    ends[r] = (int)(end < 0 ? 0 : end > count ? count : end);
  }
  for (int i = thread; i < count; i += THREADS) {
    const int column = columns[first + i];
    const bool valid = is_column(column, b_rows);
    tile_columns[i] = valid ? column : 0;
    tile_values[i] = valid ? widen(values[first + i]) : acc_t(__int_as_float(0x7fc00000));
  }
  __syncthreads();

  const index_t column = (slice * LANES + thread % LANES) * VEC;
  const bool active = column < k;
  // The group's share of the tile begins after `row` row ends and `at` nonzeros.
  const int place = group * SHARE < length ? group * SHARE : length;
  int low = place > count ? place - count : 0, high = place < tile_rows ? place : tile_rows;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] + middle < place) low = middle + 1;
    else high = middle;
  }
  int row = low, at = place - low, left = length - place < SHARE ? length - place : SHARE;
  Sums sums = {}, head = {};
  int head_row = -1;
  while (left > 0) {
    const int end = row < tile_rows ? ends[row] : count;
    int to = end < at + left ? end : at + left;
    if (to < at) to = at;
    if (active) add_nonzeros(sums, tile_columns, tile_values, b + column, k, at, to);
    left -= to - at;
    at = to;
    if (left <= 0) break;
    --left;
    if (row >= tile_rows) continue;
    // The first row that ends here may have begun in another group: it waits for that group's tail.
    if (head_row < 0) head = sums, head_row = row;
    else if (active) store(y + (first_row + row) * k + column, sums);
    sums = {};
    ++row;
  }
  keep(group_tails + thread * VEC, sums);
  if (thread % LANES == 0) any_ended[group] = head_row >= 0;
  __syncthreads();
  // A sum goes back to the last group that has ended a row.
  if (head_row >= 0 && active) {
    for (int g = group - 1; g >= 0; --g) {
      add(head, group_tails + (thread - (group - g) * LANES) * VEC);
      if (any_ended[g]) break;
    }
    // The tile's first row goes on from the tile before unless it begins here.
    if (head_row == 0 && offsets[first_row] < first) keep(heads + tile * k + column, head);
    else store(y + (first_row + head_row) * k + column, head);
  }
  if (group == GROUPS - 1 && active) {
    for (int g = group - 1; g >= 0 && !any_ended[g + 1]; --g)
      add(sums, group_tails + (thread - (group - g) * LANES) * VEC);
    keep(tails + tile * k + column, sums);
  }
  if (thread == 0 && slice == 0) {
    first_rows[tile] = first_row;
    if (stop == places) first_rows[tile + 1] = rows;
  }
}

// Adds the sums of earlier tiles to the rows that end in one tile and begin in another. A warp has a tile and
// 32 columns; rows of more than WARPS tiles are added by the whole block, one after another.
// offsets, y, first_rows, heads, tails: as above.
extern "C" __global__ void __launch_bounds__(THREADS)
spmm_carry(const offset_t* __restrict__ offsets, WEFT_T* __restrict__ y,
           const index_t* __restrict__ first_rows, const acc_t* __restrict__ heads,
           const acc_t* __restrict__ tails, index_t tiles, index_t k, index_t slices) {
  __shared__ index_t long_rows[WARPS];
  __shared__ acc_t partial[THREADS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const index_t tile = blockIdx.x / slices * WARPS + warp, column = blockIdx.x % slices * 32 + lane;
  index_t row = -1, begin = 0;
  if (tile < tiles && first_rows[tile + 1] > first_rows[tile]) {
    row = first_rows[tile];
    begin = offsets[row];
    // A row that begins in this tile needs nothing.
    if (begin < 0 || begin >= tile * TILE - row) row = -1;
  }
  // The place of the row's first item is in the tile whose tail begins the row.
  const index_t source = row < 0 ? tile : (begin + row) / TILE;
  const bool is_long = tile - source > WARPS;
  if (lane == 0) long_rows[warp] = is_long ? row : -1;
  if (row >= 0 && !is_long && column < k) {
    acc_t sum = 0;
    for (index_t t = source; t < tile; ++t) sum += tails[t * k + column];
    y[row * k + column] = narrow<WEFT_T>(sum + heads[tile * k + column]);
  }
  __syncthreads();
  for (int w = 0; w < WARPS; ++w) {
    const index_t long_row = long_rows[w], end = tile - warp + w;
    if (long_row < 0) continue;
    acc_t sum = 0;
    if (column < k)
      for (index_t t = ((index_t)offsets[long_row] + long_row) / TILE + warp; t < end; t += WARPS)
        sum += tails[t * k + column];
    partial[threadIdx.x] = sum;
    __syncthreads();
    if (warp == 0 && column < k) {
      for (int other = 1; other < WARPS; ++other) sum += partial[other * 32 + lane];
      y[long_row * k + column] = narrow<WEFT_T>(sum + heads[end * k + column]);
    }
    __syncthreads();  // the next long row overwrites the partial sums
  }
}
