// Sparse matrix (CSR) times vector by the merge path: every block has the same number of rows plus nonzeros.
//
// A block has a tile of TILE places of the merge path (sparse.cuh). It finds its rows and nonzeros by a
// search, loads the nonzeros in 16-byte accesses, multiplies them, and leaves the products and the ends of
// its rows in shared memory. Each thread then walks over ITEMS places, and adds up what lies between two row
// ends. Sums of rows that cross threads meet in a segmented scan; sums of rows that cross tiles are left in
// `heads` and `tails`, which spmv_carry adds. All orders follow from the offsets alone, so that the same
// call gives the same bits.
//
// Bytes: each nonzero's value and column once, each offset once and 2 x 4 searches a tile, y once; x from
// the caches where it fits. A tile leaves 2 sums and a row number.
#include "reduce.cuh"
#include "sparse.cuh"

#ifndef THREADS
#define THREADS 128
#endif
#ifndef ITEMS
// Odd: threads ITEMS words apart use different banks.
#define ITEMS 11
#endif

constexpr int TILE = THREADS * ITEMS;
constexpr int VEC = VEC_WIDTH;
constexpr int WARPS = THREADS / 32;
constexpr int ROUNDS = (TILE + VEC - 1 + THREADS * VEC - 1) / (THREADS * VEC);
// Resident blocks that the registers must leave room for. Without it the compiler spills a few bytes.
constexpr int RESIDENT_BLOCKS = (sizeof(acc_t) == 8 ? 896 : 1280) / THREADS;
typedef Vector<acc_t, VEC> Products;
typedef Vector<acc_t, 4> Quad;  // makes a buffer start at 16 bytes

// Writes the products of nonzeros [base, base + count) to `products`; `base` is aligned for vectors.
__device__ __forceinline__ void multiply(const WEFT_T* __restrict__ values, const int* __restrict__ columns,
                                         const WEFT_T* __restrict__ x, acc_t* products, index_t base,
                                         int count, index_t nonzeros, index_t x_size) {
  if (base + (count + VEC - 1) / VEC * VEC <= nonzeros) {
    // The vectors at both ends may have nonzeros of other tiles, whose products nothing reads. All loads of a
    // stage are issued before the first is used.
    Vector<WEFT_T, VEC> v[ROUNDS];
    Vector<int, VEC> c[ROUNDS];
    Products p[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int at = (i * THREADS + (int)threadIdx.x) * VEC;
      if (at < count) {
        c[i] = load_once<int, VEC>(columns + base + at);
        v[i] = load_once<WEFT_T, VEC>(values + base + at);
      }
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
      if ((i * THREADS + (int)threadIdx.x) * VEC < count)
#pragma unroll
        for (int j = 0; j < VEC; ++j) p[i].at[j] = gather(x, c[i].at[j], x_size);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int at = (i * THREADS + (int)threadIdx.x) * VEC;
      if (at < count) {
#pragma unroll
        for (int j = 0; j < VEC; ++j) p[i].at[j] *= widen(v[i].at[j]);
        *reinterpret_cast<Products*>(products + at) = p[i];
      }
    }
    return;
  }
  for (int at = threadIdx.x; at < count; at += THREADS)
    products[at] = widen(values[base + at]) * gather(x, columns[base + at], x_size);
}

// Returns the sum of the `tail`s of the threads before this one, back to the last that has `ended` a row,
// that one's included; `total` becomes the same of the whole block. `scratch`: a sum for each warp;
// `any_ended`: a flag for each.
__device__ __forceinline__ acc_t carry_in(acc_t tail, bool ended, acc_t* scratch, int* any_ended,
                                          acc_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned ends = __ballot_sync(ALL, ended);
  // The last lane up to this one that has ended a row begins this lane's segment; -1: an earlier warp did.
  const unsigned up_to = ends & (ALL >> (31 - lane));
  const int first = up_to ? 31 - __clz(up_to) : -1;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const acc_t left = __shfl_up_sync(ALL, tail, step, 32);
    if (lane - step >= (first > 0 ? first : 0)) tail += left;
  }
  const acc_t left = __shfl_up_sync(ALL, tail, 1, 32);
  if (lane == 31) {
    scratch[warp] = tail;
    any_ended[warp] = ends != 0;
  }
  __syncthreads();
  acc_t before = 0;
  total = 0;
#pragma unroll
  for (int k = 0; k < WARPS; ++k) {
    if (k == warp) before = total;
    total = any_ended[k] ? scratch[k] : total + scratch[k];
  }
  if (lane == 0) return before;
  // The lane to the left belongs to an earlier warp's segment if no lane up to it has ended a row.
  return (ends & (ALL >> (32 - lane))) ? left : before + left;
}

// values, columns: (nonzeros,), aligned for VEC elements; offsets: (rows + 1,); x: (x_size,); y: (rows,);
// first_rows: (tiles + 1,), the row of each tile's first place; heads, tails: (tiles,). One tile a block.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
spmv_merge(const WEFT_T* __restrict__ values, const int* __restrict__ columns,
           const offset_t* __restrict__ offsets, const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y,
           index_t* __restrict__ first_rows, acc_t* __restrict__ heads, acc_t* __restrict__ tails,
           index_t rows, index_t nonzeros, index_t x_size) {
  __shared__ Quad buffer[(TILE + 12) / 4];
  __shared__ index_t limits[2];
  __shared__ acc_t scratch[WARPS];
  __shared__ int any_ended[WARPS];
  const index_t tile = blockIdx.x, places = rows + nonzeros;
  const int thread = threadIdx.x, warp = thread / 32;
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
  // Row ends come first in the buffer, counted from `first`, then the products.
  const int shift = (int)(first % VEC);
  int* ends = reinterpret_cast<int*>(buffer);
  acc_t* aligned_products = reinterpret_cast<acc_t*>(buffer) + (tile_rows + 3) / 4 * 4;
  const acc_t* products = aligned_products + shift;
  for (int r = thread; r < tile_rows; r += THREADS) {
    const index_t end = (index_t)offsets[first_row + r + 1] - first;
    ends[r] = (int)(end < 0 ? 0 : end > count ? count : end);
  }
  multiply(values, columns, x, aligned_products, first - shift, shift + count, nonzeros, x_size);
  __syncthreads();

  // The thread's share of the tile begins after `row` row ends and `k` nonzeros.
  const int place = thread * ITEMS < length ? thread * ITEMS : length;
  int low = place > count ? place - count : 0, high = place < tile_rows ? place : tile_rows;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] + middle < place) low = middle + 1;
    else high = middle;
  }
  int row = low, k = place - low;
  const int share = length - place < ITEMS ? length - place : ITEMS;
  acc_t sum = 0, head = 0;
  int head_row = -1;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (i >= share) continue;
    if (row < tile_rows && ends[row] <= k) {
      // The first row that ends here may have begun in another thread: it waits for the scan.
      if (head_row < 0) head = sum, head_row = row;
      else y[first_row + row] = narrow<WEFT_T>(sum);
      sum = 0;
      ++row;
    } else if (k < count) {
      sum += products[k++];
    }
  }
  acc_t total;
  const acc_t carry = carry_in(sum, head_row >= 0, scratch, any_ended, total);
  if (head_row >= 0) {
    // The tile's first row goes on from the tile before unless it begins here.
    if (head_row == 0 && offsets[first_row] < first) heads[tile] = carry + head;
    else y[first_row + head_row] = narrow<WEFT_T>(carry + head);
  }
  if (thread == 0) {
    first_rows[tile] = first_row;
    tails[tile] = total;
    if (stop == places) first_rows[tile + 1] = rows;
  }
}

// Adds the sums of earlier tiles to the rows that end in one tile and begin in another: a warp for each tile.
// offsets, y, first_rows, heads, tails: as above.
extern "C" __global__ void __launch_bounds__(THREADS)
spmv_carry(const offset_t* __restrict__ offsets, WEFT_T* __restrict__ y,
           const index_t* __restrict__ first_rows, const acc_t* __restrict__ heads,
           const acc_t* __restrict__ tails, index_t tiles) {
  const index_t tile = (index_t)blockIdx.x * WARPS + threadIdx.x / 32;
  if (tile >= tiles) return;
  const int lane = threadIdx.x % 32;
  const index_t row = first_rows[tile];
  if (first_rows[tile + 1] <= row) return;  // no row ends in this tile
  const index_t begin = offsets[row];
  if (begin < 0 || begin >= tile * TILE - row) return;  // the row begins in this tile
  // The place of the row's first item is in the tile whose tail begins the row.
  acc_t sum = 0;
  for (index_t t = (begin + row) / TILE + lane; t < tile; t += 32) sum += tails[t];
  sum = warp_sum(sum);
  if (lane == 0) y[row] = narrow<WEFT_T>(sum + heads[tile]);
}
