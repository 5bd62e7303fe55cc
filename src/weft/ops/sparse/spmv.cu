// Sparse matrix (CSR) times vector: every block has the same number of nonzeros, whatever the rows' lengths.
//
// A block has a tile of TILE nonzeros. Its threads load them in 16-byte accesses, while two warps search the
// rows that begin in the tile; nothing that is loaded waits for the search. The products go to shared memory.
// Groups of lanes, as many a row as the tile's number of rows leaves, then add up the rows. A row much
// longer than the others of its tile gets a warp of its own. The sum of a row that goes on in later tiles is
// left in `tails`, and what later tiles have of it in `heads`; spmv_carry adds both. All orders follow from
// the offsets alone, so that the same call gives the same bits.
//
// A tile may have thousands of empty or short rows. Rows are therefore divided also into shares of TILE rows.
// A share with at most TILE nonzeros is thin: one block computes all its rows, and tiles leave them out. A
// share that lies inside a tile is thin, so that a tile has rows of at most two others, its first and last.
//
// Bytes: each nonzero's value and column once, each offset once and 2 searches a tile, y once; x from the
// caches where it fits. Nonzeros of thin shares are read twice. A tile leaves 2 sums and a row number.
//
// Numbers of rows and of nonzeros have the offsets' type. The host takes 64-bit offsets for close to
// 2^31 rows.
#include "overlap.cuh"
#include "reduce.cuh"
#include "sorted_search.cuh"
#include "sparse.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#ifndef ITEMS
#define ITEMS 8  // nonzeros of a thread
#endif
#ifndef THREADS_A_SM
#define THREADS_A_SM 2048  // which the registers must leave room for
#endif
#ifndef FILL
#define FILL 1  // rows of a group of lanes, where the tile's rows are equally long
#endif

constexpr int TILE = THREADS * ITEMS;
constexpr int VEC = VEC_WIDTH;
constexpr int WARPS = THREADS / 32;
constexpr int ROUNDS = ITEMS / VEC;
constexpr int RESIDENT_BLOCKS = (sizeof(acc_t) == 8 ? THREADS_A_SM / 2 : THREADS_A_SM) / THREADS;
constexpr int log2_of(int n) { return n < 2 ? 0 : 1 + log2_of(n / 2); }
constexpr int LOG_SLOTS = log2_of(FILL * THREADS);
constexpr int LONG = 32;          // a row of more nonzeros for each lane gets a warp
constexpr int LONG_CARRIES = 16;  // a row of more tiles gets a block of spmv_carry
static_assert(ITEMS % VEC == 0 && (THREADS & (THREADS - 1)) == 0 && WARPS >= 2, "vectors, two searches");
typedef Vector<acc_t, 4> Quad;  // makes a buffer start at 16 bytes

// Returns the place of product `at` in shared memory. Four words in 36 are left free, so that groups of lanes
// that read rows of 8, 16 or 32 products at once do not all use the same banks.
__device__ __forceinline__ int padded(int at) { return at + (at >> 5 << 2); }
constexpr int PADDED_TILE = TILE + TILE / 32 * 4;

// The vectors of a whole tile in the thread's registers.
struct Nonzeros {
  Vector<WEFT_T, VEC> values[ROUNDS];
  Vector<int, VEC> columns[ROUNDS];
};

__device__ __forceinline__ void load(Nonzeros& mine, const WEFT_T* values, const int* columns) {
  columns += threadIdx.x * VEC;
  values += threadIdx.x * VEC;
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) mine.columns[i] = load_once<int, VEC>(columns + i * THREADS * VEC);
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) mine.values[i] = load_once<WEFT_T, VEC>(values + i * THREADS * VEC);
}

// Writes the products of a whole tile. All gathers are issued before the first is used.
__device__ __forceinline__ void multiply(const Nonzeros& mine, const WEFT_T* __restrict__ x, index_t x_size,
                                         acc_t* products) {
  Vector<acc_t, VEC> p[ROUNDS];
  // One comparison for all columns of the thread, as unsigned numbers (is_column).
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i)
#pragma unroll
    for (int j = 0; j < VEC; ++j) largest = max(largest, (unsigned)mine.columns[i].at[j]);
  if (largest < (unsigned)x_size) {
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
#pragma unroll
      for (int j = 0; j < VEC; ++j) p[i].at[j] = widen(x[(unsigned)mine.columns[i].at[j]]);
  } else {
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
#pragma unroll
      for (int j = 0; j < VEC; ++j) p[i].at[j] = gather(x, mine.columns[i].at[j], x_size);
  }
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) p[i].at[j] *= widen(mine.values[i].at[j]);
    const int at = (i * THREADS + (int)threadIdx.x) * VEC;
    *reinterpret_cast<Vector<acc_t, VEC>*>(products + padded(at)) = p[i];
  }
}

// Writes the products of `count` nonzeros, at most TILE, that may begin anywhere.
__device__ __forceinline__ void multiply_any(const WEFT_T* __restrict__ values,
                                             const int* __restrict__ columns, const WEFT_T* __restrict__ x,
                                             index_t x_size, acc_t* products, int count) {
  for (int at = threadIdx.x; at < count; at += THREADS)
    products[padded(at)] = widen(values[at]) * gather(x, columns[at], x_size);
}

__device__ __forceinline__ bool is_thin(const offset_t* __restrict__ offsets, offset_t share, offset_t rows) {
  const offset_t from = share * TILE, to = from + TILE < rows ? from + TILE : rows;
  return (index_t)offsets[to] - offsets[from] <= TILE;
}

// A range of nonzeros whose products are in shared memory, and rows of it: `num_rows` rows, row r from
// ends[r - 1] to ends[r], and the row -1 before them where `with_before`.
struct Rows {
  const offset_t* ends;
  const acc_t* products;
  offset_t start;
  int count, num_rows;  // of nonzeros and of rows
  bool with_before;

  // Offsets that fall, or that leave the range, are clamped: no access leaves the products.
  __device__ __forceinline__ int inside(offset_t offset) const {
    const offset_t at = (offset < start ? start : offset) - start;
    return at < count ? (int)at : count;
  }
  // Adds products [from, to) with 2^shift lanes, of which this is lane `lane`.
  __device__ __forceinline__ acc_t sum(int from, int to, int lane, int shift) const {
    acc_t total = 0;
    // A count of steps from a shift: the compiler would divide by the number of lanes.
    const int lanes = 1 << shift, steps = (to - from - lane + lanes - 1) >> shift;
    int at = from + lane;
#pragma unroll 4
    for (int i = 0; i < steps; ++i, at += lanes) total += products[padded(at)];
    for (int step = lanes / 2; step > 0; step /= 2) total += __shfl_xor_sync(ALL, total, step);
    return total;
  }
};

// Adds up all rows. `store(row, end, sum)` gets each with its number in `rows`, -1 for the row before, and
// its end. `long_rows` has `num_long`, 0 at first, rows that the groups leave to warps.
template <typename Store>
__device__ __forceinline__ void add_rows(const Rows& rows, int* long_rows, int* num_long, Store store) {
  const int thread = threadIdx.x, n = rows.num_rows + rows.with_before;
  // 2^shift lanes a row: the most for which all rows take FILL rounds of groups; at least 1, at most 32.
  const int halvings = rows.num_rows > 1 ? 32 - __clz(rows.num_rows - 1) : 0;
  const int wanted = LOG_SLOTS - halvings, shift = wanted > 5 ? 5 : wanted < 0 ? 0 : wanted;
  const int groups = THREADS >> shift, lane = thread & ((1 << shift) - 1);
  // Whole warps go on or end, since the shuffles name all lanes. The row before comes last.
  const int group = thread >> shift, first_of_warp = thread / 32 << (5 - shift);
  for (int base = 0; base + first_of_warp < n; base += groups) {
    const int q = base + group, row = q < rows.num_rows ? q : -1;
    int from = 0, to = 0;
    offset_t end = 0;
    if (q < n) {
      end = rows.ends[row];
      from = rows.inside(rows.ends[row - 1]);
      to = rows.inside(end);
    }
    const bool is_long = shift < 5 && to - from > LONG << shift;
    if (is_long && lane == 0) long_rows[atomicAdd(num_long, 1)] = row;
    const acc_t sum = rows.sum(from, is_long ? from : to, lane, shift);
    if (q < n && lane == 0 && !is_long) store(row, end, sum);
  }
  __syncthreads();
  // The order of the list varies; it decides only which warp has a row.
  for (int i = thread / 32; i < *num_long; i += WARPS) {
    const int row = long_rows[i];
    const offset_t end = rows.ends[row];
    const acc_t sum = rows.sum(rows.inside(rows.ends[row - 1]), rows.inside(end), thread % 32, 5);
    if (thread % 32 == 0) store(row, end, sum);
  }
}

// values, columns: (nonzeros,), aligned for VEC elements; offsets: (rows + 1,); x: (x_size,); y: (rows,);
// tail_rows: (tiles,), the row that begins in a tile and ends in a later one, or -1; heads, tails: (tiles,),
// a tile's sums of the row that began before it, and of its tail row. rows_a_nonzero: the mean. A block for
// each tile and for each share of rows, whichever are more.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
spmv_tiles(const WEFT_T* __restrict__ values, const int* __restrict__ columns,
           const offset_t* __restrict__ offsets, const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y,
           index_t* __restrict__ tail_rows, acc_t* __restrict__ heads, acc_t* __restrict__ tails,
           index_t rows, index_t nonzeros, index_t x_size, index_t tiles, double rows_a_nonzero) {
  __shared__ Quad buffer[PADDED_TILE / 4];
  __shared__ offset_t limits[2];
  __shared__ int thin[2];
  __shared__ int long_rows[TILE / LONG];
  __shared__ int num_long[1];
  acc_t* products = reinterpret_cast<acc_t*>(buffer);
  const int thread = threadIdx.x, warp = thread / 32;
  const index_t tile = blockIdx.x, start = tile * TILE;
  launch_dependents();
  if (thread == 0) num_long[0] = 0;
  if (tile < tiles) {
    const index_t stop = start + TILE < nonzeros ? start + TILE : nonzeros;
    const int count = (int)(stop - start);
    Nonzeros mine;
    if (count == TILE) load(mine, values + start, columns + start);
    if (warp < 2) {
      // Rows [limits[0], limits[1]) begin in the tile. Empty rows at the end of the matrix begin at the last
      // nonzero's end: they belong to the last tile.
      const offset_t position = warp ? stop : start;
      offset_t row = rows;
      if (!warp || tile < tiles - 1)
        row = count_below(offsets, position, (offset_t)rows, (offset_t)(position * rows_a_nonzero));
      if (thread % 32 == 0) {
        limits[warp] = row;
        // The shares of the tile's first row and of its last one.
        const offset_t nearest = row - warp;
        thin[warp] = nearest < 0 || nearest >= rows || is_thin(offsets, nearest / TILE, rows);
      }
    }
    if (count == TILE) multiply(mine, x, x_size, products);
    else multiply_any(values + start, columns + start, x, x_size, products, count);
    __syncthreads();

    const offset_t first = limits[0], last = limits[1] > first ? limits[1] : first;
    const bool any = first < last;
    const offset_t share_end = (first / TILE + 1) * TILE, last_share = (any ? last - 1 : 0) / TILE * TILE;
    const int num_rows = any && !thin[0] ? (int)((last < share_end ? last : share_end) - first) : 0;
    const Rows rows_of_first = {offsets + first + 1, products, (offset_t)start, count, num_rows, first > 0};
    add_rows(rows_of_first, long_rows, num_long, [=](int row, offset_t end, acc_t sum) {
      if (row < 0) heads[tile] = sum;
      else if (end > stop) tails[tile] = sum;
      else y[first + row] = narrow<WEFT_T>(sum);
    });
    const bool has_rows_of_last = any && !thin[1];
    if (thread == 0) tail_rows[tile] = has_rows_of_last && offsets[last] > stop ? last - 1 : -1;
    if (has_rows_of_last && last_share >= share_end) {
      __syncthreads();  // all warps have read the list of long rows
      if (thread == 0) num_long[0] = 0;
      __syncthreads();
      const Rows rows_of_last = {offsets + last_share + 1, products, (offset_t)start, count,
                                 (int)(last - last_share), false};
      add_rows(rows_of_last, long_rows, num_long, [=](int row, offset_t end, acc_t sum) {
        if (end > stop) tails[tile] = sum;
        else y[last_share + row] = narrow<WEFT_T>(sum);
      });
    }
  }
  // The block's share of the rows has the same number, if there is one.
  if (start >= rows || !is_thin(offsets, tile, rows)) return;
  __syncthreads();  // all warps have read the tile's products and its list
  if (thread == 0) num_long[0] = 0;
  const index_t row_stop = start + TILE < rows ? start + TILE : rows;
  index_t begin = offsets[start], end = offsets[row_stop];
  begin = begin < 0 ? 0 : begin < nonzeros ? begin : nonzeros;
  end = end < begin ? begin : end < nonzeros ? end : nonzeros;
  const int count = end - begin < TILE ? (int)(end - begin) : TILE;
  multiply_any(values + begin, columns + begin, x, x_size, products, count);
  __syncthreads();
  const Rows share = {offsets + start + 1, products, (offset_t)begin, count, (int)(row_stop - start), false};
  add_rows(share, long_rows, num_long,
           [=](int row, offset_t, acc_t sum) { y[start + row] = narrow<WEFT_T>(sum); });
}

// Adds the sums of rows that end in another tile than they begin in: a thread for each tile, a block for a
// row of many tiles. offsets, y, tail_rows, heads, tails: as above; the last three are written by the kernel
// before, so that they are no constants.
extern "C" __global__ void __launch_bounds__(THREADS)
spmv_carry(const offset_t* __restrict__ offsets, WEFT_T* __restrict__ y, const index_t* tail_rows,
           const acc_t* heads, const acc_t* tails, index_t nonzeros, index_t tiles) {
  __shared__ acc_t scratch[32];
  __shared__ int long_rows[THREADS];
  __shared__ int num_long[1];
  const index_t first_tile = (index_t)blockIdx.x * THREADS, tile = first_tile + threadIdx.x;
  if (threadIdx.x == 0) num_long[0] = 0;
  __syncthreads();
  wait_for_previous_kernel();
  // The tile in which a row ends follows from its end.
  const auto last_tile = [=](index_t row) {
    const index_t end = row_end(offsets, row, nonzeros);
    return (end - 1) / TILE;
  };
  const index_t row = tile < tiles ? tail_rows[tile] : -1;
  if (row >= 0) {
    const index_t last = last_tile(row);
    if (last - tile > LONG_CARRIES) {
      long_rows[atomicAdd(num_long, 1)] = threadIdx.x;
    } else {
      acc_t sum = tails[tile];
      for (index_t t = tile + 1; t <= last; ++t) sum += heads[t];
      y[row] = narrow<WEFT_T>(sum);
    }
  }
  __syncthreads();
  for (int i = 0; i < num_long[0]; ++i) {
    const index_t source = first_tile + long_rows[i], long_row = tail_rows[source];
    const index_t last = last_tile(long_row);
    acc_t sum = 0;
#pragma unroll 8
    for (index_t t = source + 1 + threadIdx.x; t <= last; t += THREADS) sum += heads[t];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) y[long_row] = narrow<WEFT_T>(sum + tails[source]);
    __syncthreads();  // the next row overwrites `scratch`
  }
}
