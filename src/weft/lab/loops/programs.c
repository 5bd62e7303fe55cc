// Loop nests of `weft study loops`: three programs, each in variants that differ by one idea.
//
// The study compiles this file with vectorisation and unrolling by the compiler switched off, so that a
// variant has what its source says and no more. in_numba.py has the same nests.
//
//   product  c (m, n) = a (m, k) b (k, n)
//   stencil  t = S(x), y = S(t) on grids (rows, columns); S(x) = x / 2 + the four neighbours / 8.
//            Only the inner points are written: the caller has filled the edges of t and y.
//   sum      out[0] = the sum of x (n)
//
// All arrays are contiguous float32, row by row. `restrict`: no two arguments overlap.

#include <pthread.h>
#include <stdint.h>

typedef int64_t size;
typedef const float *restrict input;
typedef float *restrict output;
// Eight floats, one AVX register. aligned(4): a row begins anywhere. may_alias: it views an array of float.
typedef float lanes __attribute__((vector_size(32), aligned(4), may_alias));

enum { LANES = 8, TILE = 64, STRIP = 512, MAX_THREADS = 256 };

static size least(size a, size b) { return a < b ? a : b; }

// Parallel loops

typedef struct {
  const float *in, *in2;
  float *out;
  size n, k;  // the arguments of the loop besides its range
} job;

typedef struct {
  void (*run)(const job *, size first, size last, size thread);
  const job *job;
  size first, last, thread;
} span;

static void *run_span(void *argument) {
  const span *s = argument;
  s->run(s->job, s->first, s->last, s->thread);
  return 0;
}

// Divide [first, last) among threads; return when all have ended.
static void in_parallel(
    void (*run)(const job *, size, size, size), const job *arguments, size first, size last, size threads) {
  pthread_t ids[MAX_THREADS];
  span spans[MAX_THREADS];
  int started[MAX_THREADS];
  threads = threads < 1 ? 1 : least(threads, MAX_THREADS);
  for (size t = 0; t < threads; t++) {
    size begin = first + (last - first) * t / threads, end = first + (last - first) * (t + 1) / threads;
    spans[t] = (span){run, arguments, begin, end, t};
    // The last span runs on the calling thread. A thread that the system refuses runs there too.
    started[t] = t + 1 < threads && pthread_create(&ids[t], 0, run_span, &spans[t]) == 0;
  }
  for (size t = 0; t < threads; t++)
    if (!started[t]) run_span(&spans[t]);
  for (size t = 0; t < threads; t++)
    if (started[t]) pthread_join(ids[t], 0);
}

// Product

void product_naive(input a, input b, output c, size m, size n, size k, size threads) {
  for (size i = 0; i < m; i++)
    for (size j = 0; j < n; j++) {
      float sum = 0;
      for (size p = 0; p < k; p++) sum += a[i * k + p] * b[p * n + j];
      c[i * n + j] = sum;
    }
}

static void product_rows(input a, input b, output c, size first, size last, size n, size k) {
  for (size i = first; i < last; i++) {
    for (size j = 0; j < n; j++) c[i * n + j] = 0;
    for (size p = 0; p < k; p++) {
      float factor = a[i * k + p];
      for (size j = 0; j < n; j++) c[i * n + j] += factor * b[p * n + j];
    }
  }
}

void product_interchange(input a, input b, output c, size m, size n, size k, size threads) {
  product_rows(a, b, c, 0, m, n, k);
}

void product_tiling(input a, input b, output c, size m, size n, size k, size threads) {
  for (size i = 0; i < m * n; i++) c[i] = 0;
  for (size jj = 0; jj < n; jj += TILE)
    for (size pp = 0; pp < k; pp += TILE)
      // TILE x TILE of b, 16 KiB, stay in the L1 cache for all rows of a.
      for (size i = 0; i < m; i++)
        for (size p = pp; p < least(pp + TILE, k); p++) {
          float factor = a[i * k + p];
          for (size j = jj; j < least(jj + TILE, n); j++) c[i * n + j] += factor * b[p * n + j];
        }
}

void product_unrolling(input a, input b, output c, size m, size n, size k, size threads) {
  for (size i = 0; i < m; i++) {
    for (size j = 0; j < n; j++) c[i * n + j] = 0;
    for (size p = 0; p < k; p++) {
      float factor = a[i * k + p];
      size j = 0;
      for (; j + 4 <= n; j += 4) {
        c[i * n + j] += factor * b[p * n + j];
        c[i * n + j + 1] += factor * b[p * n + j + 1];
        c[i * n + j + 2] += factor * b[p * n + j + 2];
        c[i * n + j + 3] += factor * b[p * n + j + 3];
      }
      for (; j < n; j++) c[i * n + j] += factor * b[p * n + j];
    }
  }
}

void product_unroll_and_jam(input a, input b, output c, size m, size n, size k, size threads) {
  for (size i = 0; i < m; i++) {
    for (size j = 0; j < n; j++) c[i * n + j] = 0;
    size p = 0;
    for (; p + 4 <= k; p += 4) {
      float f0 = a[i * k + p], f1 = a[i * k + p + 1], f2 = a[i * k + p + 2], f3 = a[i * k + p + 3];
      // c is loaded and stored once for four multiply-adds.
      for (size j = 0; j < n; j++)
        c[i * n + j] += f0 * b[p * n + j] + f1 * b[(p + 1) * n + j] + f2 * b[(p + 2) * n + j] +
                        f3 * b[(p + 3) * n + j];
    }
    for (; p < k; p++) {
      float factor = a[i * k + p];
      for (size j = 0; j < n; j++) c[i * n + j] += factor * b[p * n + j];
    }
  }
}

void product_vectorisation(input a, input b, output c, size m, size n, size k, size threads) {
  for (size i = 0; i < m; i++) {
    for (size j = 0; j < n; j++) c[i * n + j] = 0;
    for (size p = 0; p < k; p++) {
      float factor = a[i * k + p];
      size j = 0;
      for (; j + LANES <= n; j += LANES) *(lanes *)(c + i * n + j) += factor * *(const lanes *)(b + p * n + j);
      for (; j < n; j++) c[i * n + j] += factor * b[p * n + j];
    }
  }
}

static void product_span(const job *g, size first, size last, size thread) {
  product_rows(g->in, g->in2, g->out, first, last, g->n, g->k);
}

void product_parallelisation(input a, input b, output c, size m, size n, size k, size threads) {
  in_parallel(product_span, &(job){a, b, c, n, k}, 0, m, threads);
}

// Stencil. `n` is the number of columns, the distance to the row below.

#define POINT(x, at, n) \
  (0.5f * (x)[at] + 0.125f * ((x)[(at) - (n)] + (x)[(at) + (n)] + (x)[(at) - 1] + (x)[(at) + 1]))

static void sweep_columns(input x, output y, size rows, size n) {
  for (size j = 1; j < n - 1; j++)
    for (size i = 1; i < rows - 1; i++) y[i * n + j] = POINT(x, i * n + j, n);
}

static void sweep_rows(input x, output y, size first, size last, size n) {
  for (size i = first; i < last; i++)
    for (size j = 1; j < n - 1; j++) y[i * n + j] = POINT(x, i * n + j, n);
}

static void sweep_strips(input x, output y, size rows, size n) {
  for (size jj = 1; jj < n - 1; jj += STRIP)
    for (size i = 1; i < rows - 1; i++)
      for (size j = jj; j < least(jj + STRIP, n - 1); j++) y[i * n + j] = POINT(x, i * n + j, n);
}

static void sweep_split(input x, output y, size rows, size n) {
  for (size i = 1; i < rows - 1; i++)
    for (size j = 1; j < n - 1; j++)
      y[i * n + j] = 0.5f * x[i * n + j] + 0.125f * (x[i * n + j - 1] + x[i * n + j + 1]);
  for (size i = 1; i < rows - 1; i++)
    for (size j = 1; j < n - 1; j++) y[i * n + j] += 0.125f * (x[(i - 1) * n + j] + x[(i + 1) * n + j]);
}

static void sweep_lanes(input x, output y, size rows, size n) {
  for (size i = 1; i < rows - 1; i++) {
    size j = 1;
    for (; j + LANES <= n - 1; j += LANES) {
      const float *at = x + i * n + j;
      lanes above = *(const lanes *)(at - n), below = *(const lanes *)(at + n);
      lanes left = *(const lanes *)(at - 1), right = *(const lanes *)(at + 1);
      *(lanes *)(y + i * n + j) = 0.5f * *(const lanes *)at + 0.125f * (above + below + left + right);
    }
    for (; j < n - 1; j++) y[i * n + j] = POINT(x, i * n + j, n);
  }
}

void stencil_naive(input x, output t, output y, size rows, size n, size threads) {
  sweep_columns(x, t, rows, n);
  sweep_columns(t, y, rows, n);
}

void stencil_interchange(input x, output t, output y, size rows, size n, size threads) {
  sweep_rows(x, t, 1, rows - 1, n);
  sweep_rows(t, y, 1, rows - 1, n);
}

void stencil_tiling(input x, output t, output y, size rows, size n, size threads) {
  sweep_strips(x, t, rows, n);
  sweep_strips(t, y, rows, n);
}

// t has three rows: row i of the first sweep is in row i % 3, until the second sweep has used it.
void stencil_fusion(input x, output t, output y, size rows, size n, size threads) {
  for (size j = 0; j < n; j++) t[j] = x[j];
  for (size i = 1; i < rows; i++) {
    float *restrict row = t + i % 3 * n;
    if (i < rows - 1) {
      row[0] = x[i * n];
      for (size j = 1; j < n - 1; j++) row[j] = POINT(x, i * n + j, n);
      row[n - 1] = x[i * n + n - 1];
    } else {
      for (size j = 0; j < n; j++) row[j] = x[i * n + j];
    }
    if (i < 2) continue;
    const float *above = t + (i - 2) % 3 * n, *middle = t + (i - 1) % 3 * n;
    for (size j = 1; j < n - 1; j++)
      y[(i - 1) * n + j] = 0.5f * middle[j] + 0.125f * (above[j] + row[j] + middle[j - 1] + middle[j + 1]);
  }
}

void stencil_fission(input x, output t, output y, size rows, size n, size threads) {
  sweep_split(x, t, rows, n);
  sweep_split(t, y, rows, n);
}

void stencil_vectorisation(input x, output t, output y, size rows, size n, size threads) {
  sweep_lanes(x, t, rows, n);
  sweep_lanes(t, y, rows, n);
}

static void sweep_span(const job *g, size first, size last, size thread) {
  sweep_rows(g->in, g->out, first, last, g->n);
}

void stencil_parallelisation(input x, output t, output y, size rows, size n, size threads) {
  // All threads end the first sweep before one begins the second, which reads its neighbours' rows.
  in_parallel(sweep_span, &(job){.in = x, .out = t, .n = n}, 1, rows - 1, threads);
  in_parallel(sweep_span, &(job){.in = t, .out = y, .n = n}, 1, rows - 1, threads);
}

// Sum

static float sum_of(input x, size first, size last) {
  float sum = 0;
  for (size i = first; i < last; i++) sum += x[i];
  return sum;
}

void sum_naive(input x, output out, size n, size threads) { out[0] = sum_of(x, 0, n); }

void sum_unrolling(input x, output out, size n, size threads) {
  float s0 = 0, s1 = 0, s2 = 0, s3 = 0;  // four chains of additions, each waits for itself alone
  size i = 0;
  for (; i + 4 <= n; i += 4) {
    s0 += x[i];
    s1 += x[i + 1];
    s2 += x[i + 2];
    s3 += x[i + 3];
  }
  for (; i < n; i++) s0 += x[i];
  out[0] = (s0 + s1) + (s2 + s3);
}

void sum_vectorisation(input x, output out, size n, size threads) {
  lanes sums = {0};
  size i = 0;
  for (; i + LANES <= n; i += LANES) sums += *(const lanes *)(x + i);
  float sum = 0;
  for (size lane = 0; lane < LANES; lane++) sum += sums[lane];
  for (; i < n; i++) sum += x[i];
  out[0] = sum;
}

static void sum_span(const job *g, size first, size last, size thread) {
  g->out[thread] = sum_of(g->in, first, last);
}

void sum_parallelisation(input x, output out, size n, size threads) {
  float sums[MAX_THREADS] = {0}, sum = 0;
  in_parallel(sum_span, &(job){.in = x, .out = sums}, 0, n, threads);
  for (size t = 0; t < least(threads, MAX_THREADS); t++) sum += sums[t];
  out[0] = sum;
}
