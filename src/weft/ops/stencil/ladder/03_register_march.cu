// Step 3: a thread marches down a column with three cells in registers.
//
// Each row is loaded once and is the southern, the own and the northern row in turn, without a barrier. West
// and east are two more loads, which the L1 cache serves. Bytes: n read and n written, and two rows more for
// each 32; one element an access.
#include "terms.cuh"

constexpr int PIECE = 32;  // rows of a march

// x: (batches, rows, columns), grids at batch_stride and rows at row_stride elements; weights: (5,); y:
// (batches, rows, columns) contiguous. Blocks have a piece of blockDim.x columns.
extern "C" __global__ void stencil(const WEFT_T* x, const WEFT_T* weights, WEFT_T* y, index_t batches,
                                   index_t rows, index_t columns, index_t batch_stride, index_t row_stride) {
  const Tile t = tile_of(blockIdx.x, rows, columns, PIECE, blockDim.x);
  const index_t j = t.column + threadIdx.x, last = min(t.row + PIECE, rows);
  if (j >= columns) return;
  const WEFT_T* cell = x + t.batch * batch_stride + t.row * row_stride + j;
  WEFT_T* target = y + (t.batch * rows + t.row) * columns + j;
  float north = t.row > 0 ? to_float(cell[-row_stride]) : 0.0f, own = to_float(cell[0]);
  for (index_t i = t.row; i < last; ++i) {
    const float south = i + 1 < rows ? to_float(cell[row_stride]) : 0.0f;
    float sum = to_float(weights[0]) * own;
    sum = add_if(i > 0, to_float(weights[1]), north, sum);
    sum = add_if(i + 1 < rows, to_float(weights[2]), south, sum);
    if (j > 0) sum = fmaf(to_float(weights[3]), to_float(cell[-1]), sum);
    if (j + 1 < columns) sum = fmaf(to_float(weights[4]), to_float(cell[1]), sum);
    *target = from_float<WEFT_T>(sum);
    north = own, own = south;
    cell += row_stride, target += columns;
  }
}
