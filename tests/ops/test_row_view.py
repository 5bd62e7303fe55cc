"""Rows that begin at any element: exhaustive test of how row_view.cuh divides them, for 2-byte elements.

The functions are compiled by g++. Every row length up to 99 is tried at every position behind a multiple of
16 bytes; every vector of 16 bytes is cut out of 32 at each of its eight positions.
"""

from __future__ import annotations

import ctypes

import pytest

from helpers.cxx import COMPILER, compile_library
from weft.backends.nvrtc import SHARED

PROGRAM = r"""
#include <algorithm>
#include <cstring>
#define __device__
#define __forceinline__ inline
typedef unsigned short WEFT_T;
typedef long long index_t;
struct uint4 { unsigned x, y, z, w; };
constexpr int N = 8;
using std::max, std::min;
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return (unsigned)(((unsigned long long)high << 32 | low) >> (bits & 31));
}
static float to_float(WEFT_T v) { return v; }
template <typename T> static T from_float(float v) { return (T)v; }
template <typename T, int M> struct alignas(sizeof(T) * M) Vector { T at[M]; };
#include "row_view.cuh"
struct alignas(16) Pack { WEFT_T at[N]; };

// The number of rows that are cut wrongly.
extern "C" int wrong_rows() {
  int wrong = 0;
  for (int begin = 0; begin < N; ++begin)
    for (int columns = 1; columns < 100; ++columns) {
      const RowView view((const WEFT_T*)(size_t)(4096 + 2 * begin), columns);
      int seen[100] = {};
      bool fits = view.edges <= MOST_EDGES && view.vecs >= 0;
      if (view.vecs) {
        fits &= (begin + view.head) % N == 0 && view.head >= PEEL_MARGIN;
        fits &= columns - view.head - view.vecs * N >= PEEL_MARGIN;
      } else {
        fits &= columns < 2 * PEEL_MARGIN + 2 * N;
      }
      for (int k = 0; k < view.vecs * N; ++k) ++seen[view.head + k];
      for (int e = 0; e < view.edges; ++e) ++seen[view.edge_column(e)];
      for (int c = 0; c < columns; ++c) fits &= seen[c] == 1;
      wrong += !fits;
    }
  return wrong;
}

// The number of positions from which a vector is cut out wrongly.
extern "C" int wrong_vectors() {
  alignas(16) WEFT_T row[4 * N];
  for (int k = 0; k < 4 * N; ++k) row[k] = (WEFT_T)(1000 + 7 * k);
  int wrong = 0;
  for (int begin = 0; begin < N; ++begin)
    for (int i = 0; i < 2; ++i) {
      const Pack p = Body<Pack, true>(row + begin)[i];
      wrong += std::memcmp(p.at, row + begin + i * N, 16) != 0;
    }
  return wrong;
}

// The number of vectors of a body, in the tensor's last row or before it, that are loaded or cut wrongly.
extern "C" int wrong_blocks() {
  alignas(16) WEFT_T row[6 * N];
  int wrong = 0;
  for (int begin = 0; begin < (PEEL == 2 ? N : 1); ++begin)
    for (int vecs = 0; vecs < 5; ++vecs)
      for (int last = 0; last < 2; ++last) {
        for (int k = 0; k < 6 * N; ++k) row[k] = (WEFT_T)(1000 + 7 * k);
        const WEFT_T* const end = row + begin + vecs * N;
        BodyBlocks<3, 2> lanes[2];
        for (int lane = 0; lane < 2; ++lane) lanes[lane].load(row + begin, vecs, lane, last ? end : nullptr);
        for (int v = 0; v < 6; ++v) {
          const auto p = lanes[v % 2].cut(v / 2, begin * (int)sizeof(WEFT_T));
          const WEFT_T none[N] = {};
          wrong += std::memcmp(p.at, v < vecs ? row + begin + v * N : none, 16) != 0;
        }
        // In the last row the second block of the last vector is 0 past the end.
        if (PEEL == 2 && last && vecs && begin) {
          const auto& blocks = lanes[(vecs - 1) % 2].blocks[(vecs - 1) / 2];
          const auto* words = reinterpret_cast<const WEFT_T*>(&blocks[lanes[0].BLOCKS - 1]);
          for (int j = begin; j < N; ++j) wrong += words[j] != 0;
        }
      }
  return wrong;
}
"""


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize("peel", [1, 2])
def test_every_row_is_cut_into_edges_and_aligned_vectors(peel: int) -> None:
    functions = ctypes.CDLL(str(compile_library(PROGRAM, [SHARED], [f"-DPEEL={peel}"])))
    assert functions.wrong_rows() == 0
    assert functions.wrong_vectors() == 0
    assert functions.wrong_blocks() == 0
