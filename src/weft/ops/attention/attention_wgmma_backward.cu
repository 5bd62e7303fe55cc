// Attention's backward by Hopper's tensor cores (wgmma, sm_90a): float16 and bfloat16, no dropout, HEAD up to
// 128.
//
// dv = p^T grad, ds = p (grad v^T - delta), dk = scale ds^T q, dq = scale ds k: five products with s = q k^T.
// A block has KEYS keys of one head of keys, 64 for each of two warp groups, and goes over the queries of all
// heads that share them, QUERIES at a time. Scores and weights are transposed (keys x queries), so that p^T
// and ds^T are first factors in registers for dv and dk. ds goes through shared memory for dq. The product
// for dq is issued one step late: a group then does not wait for the other's ds of the same step, and one
// group's products run while the other has its exponentials.
//
// dq of a tile of queries has a part from each tile of keys. Parts are added in float32 in global memory, by
// the copy engine and in a fixed order, so that the bits are always the same: from the first visible tile of
// keys to the last. A counter for each tile of queries has the number of parts that were added. A block
// waits only for blocks with a smaller index, which have been started before it. With a causal mask the first
// tiles of keys have the most queries, so that the longest blocks are started first. All blocks go over the
// queries from the last to the first: they come by each tile of queries in their order.
//
// BAND compiles a causal mask with a window or at the bottom right (mask.py): a block's queries end where the
// window does. SOFTCAP caps the scores as the forward does.
//
// Two kernels: row terms (log2-sum-exp and delta = sum(out grad)), and the products. A block of the second
// takes tiles of keys and, when a section of heads has all parts of dq, tiles of dq that it rounds.
// Source: FlashAttention-3 (arXiv:2407.08608).
#include "hopper/barrier.cuh"
#include "hopper/warp_roles.cuh"
#include "hopper/wgmma.cuh"
#include "hopper/wgmma_register_shapes.cuh"
#include "hopper/wgmma_score_shapes.cuh"
#include "numeric.cuh"

#ifndef HEAD
#define HEAD 128
#define QUERIES 64
#define BAND 0
#define SOFTCAP 0
#endif

using namespace hopper;
using T = WEFT_T;

namespace {

constexpr int BOXES = (HEAD + 63) / 64, D_STEPS = (HEAD + 15) / 16, COLUMNS = BOXES * 64;
constexpr int GROUPS = 2, KEYS = 64 * GROUPS, THREADS = GROUP_THREADS * (1 + GROUPS);
constexpr int STAGES = 2;   // of queries and gradients, of ds, and of dq
constexpr int ROUNDED = 8;  // tiles of dq that a block rounds at a time
constexpr int KEY_BOX = KEYS * 128, KEY_TILE = BOXES * KEY_BOX;
constexpr int QUERY_BOX = QUERIES * 128, QUERY_TILE = BOXES * QUERY_BOX;
constexpr int TERMS_BYTES = 2 * QUERIES * 4, STAGE_BYTES = 2 * QUERY_TILE + ATOM_BYTES;  // q, grad, terms
// dq of a tile of queries: parts of 64 x 64 sums, one of each group. With one part the groups compute tiles
// alternately.
constexpr int PARTS = BOXES * QUERIES / 64, PART_BYTES = 64 * 64 * 4, DQ_BYTES = PARTS * PART_BYTES;
constexpr int V_AT = KEY_TILE, RING_AT = 2 * KEY_TILE, DS_AT = RING_AT + STAGES * STAGE_BYTES;
constexpr int DS_BOX = KEYS * 128, DS_BYTES = QUERIES / 64 * DS_BOX, DQ_AT = DS_AT + STAGES * DS_BYTES;
constexpr int BARRIERS_AT = DQ_AT + STAGES * DQ_BYTES;
constexpr int LOADED_AT = BARRIERS_AT + 3 * Pipeline<STAGES>::BYTES, INDEX_AT = LOADED_AT + 24;
constexpr int SHARED_BYTES = INDEX_AT + 8;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(PARTS <= GROUPS && SHARED_BYTES <= 227 << 10, "too much shared memory");
constexpr int ALL_READ = 1, GROUP_BARRIER = 2;  // named barriers
#define INFINITE __int_as_float(0x7f800000)

}  // namespace

#include "attention_wgmma_terms.cuh"

// attention_wgmma_backward.py declares the same fields in the same order.
struct alignas(64) WgmmaBackwardArgs {
  TensorMap q, k, v, grad, dk, dv;
  const float* terms;  // (B, H, query_tiles, 2, QUERIES)
  float* dq_sums;      // (B, H, query_tiles, DQ_BYTES): in the order of a group's accumulators
  int* counters;       // (B, H, query_tiles): parts that were added to dq_sums
  int* taken;          // tiles of keys that blocks have taken
  const int* lengths;  // (B,): visible keys of each batch; null: all
  int heads, group, tq, tk, causal, key_tiles, query_tiles;
  int kv_heads, section;  // heads of keys of all batches; those that are computed side by side
  T* dq;                  // (B, H, Tq, HEAD), strides in elements
  long long dq_strides[3];
  float scale_log2, scale;
  int window, bottom_right;  // with BAND
  float cap_scale;           // with SOFTCAP: 2 log2(e) scale / cap
};

#include "attention_wgmma_backward_work.cuh"

namespace {

struct Memory {
  unsigned base;

  __device__ __forceinline__ unsigned k() const { return base; }
  __device__ __forceinline__ unsigned v() const { return base + V_AT; }
  __device__ __forceinline__ unsigned q(int stage) const { return base + RING_AT + stage * STAGE_BYTES; }
  __device__ __forceinline__ unsigned grad(int stage) const { return q(stage) + QUERY_TILE; }
  __device__ __forceinline__ unsigned terms(int stage) const { return q(stage) + 2 * QUERY_TILE; }
  __device__ __forceinline__ unsigned ds(int stage) const { return base + DS_AT + stage * DS_BYTES; }
  __device__ __forceinline__ unsigned dq(int stage) const { return base + DQ_AT + stage * DQ_BYTES; }
  __device__ __forceinline__ Pipeline<STAGES> ring() const { return {base + BARRIERS_AT}; }
  __device__ __forceinline__ Pipeline<STAGES> ds_buffers() const {
    return {base + BARRIERS_AT + Pipeline<STAGES>::BYTES};
  }
  __device__ __forceinline__ Pipeline<STAGES> dq_buffers() const {
    return {base + BARRIERS_AT + 2 * Pipeline<STAGES>::BYTES};
  }
  __device__ __forceinline__ unsigned loaded() const { return base + LOADED_AT; }  // k and v are in place
  __device__ __forceinline__ unsigned cleared() const { return base + LOADED_AT + 8; }  // and have no NaN
  __device__ __forceinline__ unsigned unused() const { return base + LOADED_AT + 16; }  // make room
  __device__ __forceinline__ unsigned index() const { return base + INDEX_AT; }  // of Work; -1: no more
};

template <int BOX_ROWS>
__device__ __forceinline__ void load_tile(unsigned to, const TensorMap* map, int row, int head, int batch,
                                          unsigned barrier) {
#pragma unroll
  for (int box = 0; box < BOXES; ++box)
    tma_load(to + box * BOX_ROWS * 128, map, box * 64, row, head, batch, barrier);
}

// One warp: loads keys and values of a tile, then queries and gradients.
struct Producer {
  const WgmmaBackwardArgs& args;
  Memory memory;
  bool issuer;
  RingPosition<STAGES> ring;
  unsigned loaded_parity = 0, unused_parity = 1;

  // Waits until the block's tile of keys before this one makes room.
  __device__ __forceinline__ void announce(int index) {
    wait(memory.unused(), unused_parity);
    unused_parity ^= 1;
    if (issuer) store_word(memory.index(), index);
  }

  __device__ __forceinline__ void load_keys(const Work& work) {
    if (issuer) {
      mbarrier_arrive_expect(memory.loaded(), 2 * KEY_TILE);
      load_tile<KEYS>(memory.k(), &args.k, work.tile * KEYS, work.kv_head, work.batch, memory.loaded());
      load_tile<KEYS>(memory.v(), &args.v, work.tile * KEYS, work.kv_head, work.batch, memory.loaded());
    }
    __syncwarp();
    wait(memory.loaded(), loaded_parity);
    loaded_parity ^= 1;
    // Keys past a batch's length may be NaN, and 0 times NaN is NaN.
    const int hidden = work.keys - work.tile * KEYS;
    if (hidden < KEYS && work.keys < args.tk) {
      for (int chunk = hidden * 8 + threadIdx.x % 32; chunk < KEYS * 8; chunk += 32)
#pragma unroll
        for (int box = 0; box < 2 * BOXES; ++box) store_zeros(memory.k() + box * KEY_BOX + chunk * 16);
      fence_async_proxy();
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_queries(const Work& work, const Step& at) {
    if (issuer) {
      const int first = at.query_tile * QUERIES;
      const unsigned full = memory.ring().full(ring.stage);
      memory.ring().begin_fill(ring, 2 * QUERY_TILE + TERMS_BYTES);
      load_tile<QUERIES>(memory.q(ring.stage), &args.q, first, at.head, work.batch, full);
      load_tile<QUERIES>(memory.grad(ring.stage), &args.grad, first, at.head, work.batch, full);
      bulk_load(memory.terms(ring.stage), args.terms + work.index(args, at) * (TERMS_BYTES / 4), TERMS_BYTES,
                full);
    }
    ring.next();
  }

  // Tiles are taken in their order: those that a tile waits for have been taken before it.
  __device__ __forceinline__ int take() const {
    int taken = 0;
    if (threadIdx.x % 32 == 0) taken = atomicAdd(args.taken, 1);
    return __shfl_sync(0xffffffff, taken, 0);
  }

  __device__ __forceinline__ void run() {
    const int count = args.kv_heads * (args.key_tiles + Work::rounds(args));
    for (int index = take(); index < count; index = take()) {
      const Work work(args, index);
      const int steps = work.steps(args);
      Step at = work.first_step(args);
      // The first queries come while the block still works on its tile of keys before this one.
      if (steps) load_queries(work, at);
      announce(index);
      if (steps) load_keys(work);
      if (issuer) mbarrier_arrive(memory.cleared());
      for (int step = 1; step < steps; ++step) {
        work.next(at);
        load_queries(work, at);
      }
    }
    announce(-1);
    if (issuer) mbarrier_arrive(memory.cleared());
  }
};

// One thread for each buffer of dq: adds the parts of every other step, each after those of the tiles of keys
// before it. The two overlap: an addition, and its announcement to the next block, take longer than a step.
__device__ __forceinline__ void add_dq(const WgmmaBackwardArgs& args, Memory memory, int stage) {
  unsigned cleared_parity = 0, parity = 0;
  int turn = 0;
  while (true) {
    wait(memory.cleared(), cleared_parity);
    cleared_parity ^= 1;
    const int index = load_word(memory.index());
    if (index < 0) return;
    mbarrier_arrive(memory.unused());
    const Work work(args, index);
    Step at = work.first_step(args);
    for (int step = 0; step < work.steps(args); ++step, work.next(at)) {
      if (turn++ % STAGES != stage) continue;
      const long long tile = work.index(args, at);
      float* const to = args.dq_sums + tile * (DQ_BYTES / 4);
      const int rank = work.rank(args, at.query_tile);
      // The parts before it are mostly there long before the block's own.
      while (rank > 0 && load_acquire(args.counters + tile) != rank) {
      }
      wait(memory.dq_buffers().full(stage), parity);
      parity ^= 1;
      if (rank == 0) bulk_store(to, memory.dq(stage), DQ_BYTES);
      else bulk_add(to, memory.dq(stage), DQ_BYTES);
      tma_commit();
      tma_wait_read<0>();
      memory.dq_buffers().release(stage);
      tma_wait<0>();  // complete, not only read: the next block adds to it
      store_release(args.counters + tile, rank + 1);
    }
  }
}

struct Consumer {
  const WgmmaBackwardArgs& args;
  Memory memory;
  int group;
  RingPosition<STAGES> ring, ds_written, ds_read;  // dq has the buffer of the ds that it comes from

  // Replaces scores by weights: 0 for hidden keys. Rows are keys, columns queries.
  __device__ __forceinline__ void weigh(float (&s)[QUERIES / 2], const Work& work, unsigned terms,
                                        int query_tile) const {
    const int thread = threadIdx.x % GROUP_THREADS, first_key = work.tile * KEYS + group * 64;
    // Position of the tile's first query. Without BAND the code below has the product instead of this
    // variable, which would cost two registers.
    const int position = query_tile * QUERIES + shift(args, work.keys);
    const bool masked = first_key + 64 > work.keys ||
                        (args.causal && first_key + 63 > (BAND ? position : query_tile * QUERIES)) ||
                        (BAND && first_key < position + QUERIES - args.window);
#pragma unroll
    for (int x = 0; x < QUERIES / 8; ++x) {
      float lse[2];
      load_two(lse, terms + accumulator_column(thread, 4 * x) * 4);
#pragma unroll
      for (int i = 4 * x; i < 4 * x + 4; ++i) {
        if (SOFTCAP) s[i] = fmaf(-2.0f, reciprocal(power_of_2(s[i] * args.cap_scale) + 1.0f), 1.0f);
        s[i] = power_of_2(fmaf(s[i], args.scale_log2, -lse[i % 2]));
      }
    }
    if (!masked) return;
#pragma unroll
    for (int i = 0; i < QUERIES / 2; ++i) {
      const int key = first_key + accumulator_row(thread, i);
      const int query = (BAND ? position : query_tile * QUERIES) + accumulator_column(thread, i);
      if (key >= work.keys || (args.causal && key > query) || (BAND && key <= query - args.window))
        s[i] = 0.0f;
    }
  }

  // s = s (dp - delta): the gradients of the scores, without the factor `scale`. With SOFTCAP times 1 -
  // t^2, the slope of the tangent t, which comes back from the weight's logarithm: there are no registers
  // to keep it. A weight of 0, whose logarithm is -inf, has slope 0.
  __device__ __forceinline__ void differentiate(float (&s)[QUERIES / 2], const float (&dp)[QUERIES / 2],
                                                unsigned terms) const {
    const int thread = threadIdx.x % GROUP_THREADS;
    const float inverse = SOFTCAP ? reciprocal(args.scale_log2) : 0.0f;
#pragma unroll
    for (int x = 0; x < QUERIES / 8; ++x) {
      float delta[2], lse[2];
      load_two(delta, terms + (QUERIES + accumulator_column(thread, 4 * x)) * 4);
      if (SOFTCAP) load_two(lse, terms + accumulator_column(thread, 4 * x) * 4);
#pragma unroll
      for (int i = 4 * x; i < 4 * x + 4; ++i) {
        const float weight = s[i];
        s[i] *= dp[i] - delta[i % 2];
        if (SOFTCAP) {
          const float t = fmaxf((binary_logarithm(weight) + lse[i % 2]) * inverse, -1.0f);
          s[i] *= fmaf(-t, t, 1.0f);
        }
      }
    }
  }

  __device__ __forceinline__ void round(unsigned (&factor)[QUERIES / 16][4],
                                        const float (&s)[QUERIES / 2]) const {
#pragma unroll
    for (int i = 0; i < QUERIES / 4; ++i) factor[i / 4][i % 4] = rounded_pair<T>(s[2 * i], s[2 * i + 1]);
  }

  // Issues s = a b^T: 64 rows of a tile of keys (or values), and a tile of queries (or gradients).
  __device__ __forceinline__ void multiply_rows(float (&s)[QUERIES / 2], unsigned a, unsigned b) const {
    const unsigned long long rows = descriptor<K_MAJOR>(a + group * 64 * 128);
    const unsigned long long columns = descriptor<K_MAJOR>(b);
#pragma unroll
    for (int step = 0; step < D_STEPS; ++step) {
      const int box = step / 4, in_box = step % 4 * K_STEP_BYTES<K_MAJOR>;
      Wgmma<T, K_MAJOR, K_MAJOR, QUERIES>::run(s, advance(rows, box * KEY_BOX + in_box),
                                               advance(columns, box * QUERY_BOX + in_box), step > 0);
    }
    wgmma_commit();
  }

  // Issues sums += factor b: over the queries of a tile.
  __device__ __forceinline__ void multiply_factor(float (&sums)[COLUMNS / 2],
                                                  const unsigned (&factor)[QUERIES / 16][4],
                                                  unsigned b) const {
    const unsigned long long rows = descriptor<MN_MAJOR, QUERY_BOX>(b);
#pragma unroll
    for (int step = 0; step < QUERIES / 16; ++step)
      WgmmaFromRegisters<T, MN_MAJOR, COLUMNS>::run(sums, factor[step],
                                                    advance(rows, step * K_STEP_BYTES<MN_MAJOR>), 1);
    wgmma_commit();
  }

  // Issues the group's part of ds k, over all keys of the block.
  __device__ __forceinline__ void multiply_dq(float (&dq)[32]) const {
    const unsigned long long ds =
        descriptor<MN_MAJOR>(memory.ds(ds_read.stage) + (QUERIES > 64 ? group * DS_BOX : 0));
    const unsigned long long k = descriptor<MN_MAJOR>(memory.k() + (BOXES == 2 ? group * KEY_BOX : 0));
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
      const int rows = step * K_STEP_BYTES<MN_MAJOR>;
      Wgmma<T, MN_MAJOR, MN_MAJOR, 64>::run(dq, advance(ds, rows), advance(k, rows), step > 0);
    }
    wgmma_commit();
  }

  // Writes 64 x 16 N elements as rows of a swizzled tile: of ds (keys x queries), or of dk and dv.
  template <int N>
  __device__ __forceinline__ void store_rows(unsigned to, int box_bytes,
                                             const unsigned (&words)[N][4]) const {
    const int thread = threadIdx.x % GROUP_THREADS, lane = thread % 32, row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int pair = 0; pair < N; ++pair) {
      const int chunk = (pair % 4 * 2 + lane / 16) ^ (row & 7);
      store_matrices(to + pair / 4 * box_bytes + (group * 64 + row) * 128 + chunk * 16, words[pair][0],
                     words[pair][1], words[pair][2], words[pair][3]);
    }
  }

  __device__ __forceinline__ bool computes_dq(int step) const { return PARTS == 2 || step % GROUPS == group; }

  // Gives the sums of dq to the thread that adds them, and the buffer of ds to the groups.
  __device__ __forceinline__ void store_dq(const float (&dq)[32]) {
    if (threadIdx.x % 32 == 0) memory.ds_buffers().release(ds_read.stage);
    wait(memory.dq_buffers().empty(ds_read.stage), ds_read.parity ^ 1);
    const unsigned to = memory.dq(ds_read.stage) + (PARTS == 2 ? group * PART_BYTES : 0);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      store_four(to + (i * GROUP_THREADS + threadIdx.x % GROUP_THREADS) * 16, dq[4 * i], dq[4 * i + 1],
                 dq[4 * i + 2], dq[4 * i + 3]);
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(memory.dq_buffers().full(ds_read.stage));
  }

  // Adds to dk and dv over all steps, and computes dq, each part in the step after. At the end of a step no
  // product runs: ptxas waits for every single one if accumulators are in flight from one step to the next.
  __device__ __forceinline__ void differentiate_all(float (&dk)[COLUMNS / 2], float (&dv)[COLUMNS / 2],
                                                    const Work& work, int steps) {
    float s[QUERIES / 2], dp[QUERIES / 2], dq[32];
    unsigned p[QUERIES / 16][4], ds[QUERIES / 16][4];
    Step at = work.first_step(args);
#pragma unroll 1
    for (int step = 0; step < steps; ++step, work.next(at)) {
      const int stage = ring.stage;
      memory.ring().wait_full(ring);
      ring.next();
      wgmma_fence();
      multiply_rows(s, memory.k(), memory.q(stage));
      multiply_rows(dp, memory.v(), memory.grad(stage));
      wgmma_wait<1>();  // s; the product for dp runs during the exponentials
      pin_registers(s);
      weigh(s, work, memory.terms(stage), at.query_tile);
      // 128 queries leave no registers for weights beside the scores: then dv's product is issued later.
      if (QUERIES == 64) {
        round(p, s);
        wgmma_fence();
        multiply_factor(dv, p, memory.grad(stage));
        wgmma_wait<1>();  // dp; the product for dv runs on
      } else {
        wgmma_wait<0>();
      }
      pin_registers(dp);
      if (QUERIES > 64) round(p, s);
      differentiate(s, dp, memory.terms(stage));
      round(ds, s);
      if (QUERIES > 64) {
        wgmma_fence();
        multiply_factor(dv, p, memory.grad(stage));
      }
      wait(memory.ds_buffers().empty(ds_written.stage), ds_written.parity ^ 1);
      store_rows(memory.ds(ds_written.stage), DS_BOX, ds);
      fence_async_proxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(memory.ds_buffers().full(ds_written.stage));
      ds_written.next();
      // With two parts there are no registers for a product in a branch: step 0 computes its own part of dq,
      // which is thrown away, and step 1 computes it again.
      const bool has_dq = PARTS == 2 || (step > 0 && computes_dq(step - 1));
      if (has_dq) memory.ds_buffers().wait_full(ds_read);
      wgmma_fence();
      if (PARTS == 2) multiply_dq(dq);
      multiply_factor(dk, ds, memory.q(stage));
      if (PARTS == 2) {
        wgmma_wait<1>();  // dq; the product for dk runs on
        pin_registers(dq);
        if (step > 0) store_dq(dq);
      } else if (has_dq) {
        multiply_dq(dq);
      }
      wgmma_wait<0>();
      pin_registers(dk);
      pin_registers(dv);
      pin_registers(p);
      pin_registers(ds);
      if (threadIdx.x % 32 == 0) memory.ring().release(stage);
      if (PARTS == 1 && has_dq) {
        pin_registers(dq);
        store_dq(dq);
      }
      if (step > 0) ds_read.next();
    }
    if (computes_dq(steps - 1)) {
      memory.ds_buffers().wait_full(ds_read);
      wgmma_fence();
      multiply_dq(dq);
      wgmma_wait<0>();
      pin_registers(dq);
      store_dq(dq);
    }
    ds_read.next();
  }

  // Writes dk and dv of a tile of keys, through the shared memory of k and v.
  __device__ __forceinline__ void store(const float (&dk)[COLUMNS / 2],
                                        const float (&dv)[COLUMNS / 2]) const {
    named_barrier(ALL_READ, GROUPS * GROUP_THREADS);
    unsigned words[COLUMNS / 16][4];
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; ++i)
      words[i / 4][i % 4] = rounded_pair<T>(dk[2 * i] * args.scale, dk[2 * i + 1] * args.scale);
    store_rows(memory.k(), KEY_BOX, words);
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; ++i) words[i / 4][i % 4] = rounded_pair<T>(dv[2 * i], dv[2 * i + 1]);
    store_rows(memory.v(), KEY_BOX, words);
    fence_async_proxy();
    named_barrier(GROUP_BARRIER + group, GROUP_THREADS);
    if (!is_storer()) return;
    const Work work(args, load_word(memory.index()));  // again: registers would keep it through all steps
    const int first = work.tile * KEYS + group * 64;
#pragma unroll
    for (int box = 0; box < BOXES; ++box) {
      const unsigned offset = box * KEY_BOX + group * 64 * 128;
      tma_store(&args.dk, memory.k() + offset, box * 64, first, work.kv_head, work.batch);
      tma_store(&args.dv, memory.v() + offset, box * 64, first, work.kv_head, work.batch);
    }
    tma_commit();
    tma_wait_read<0>();
    mbarrier_arrive(memory.unused());
  }

  // Writes the group's half of a tile of dq, whose first query is `first`: scale times the sums.
  template <int LOADS>
  __device__ __forceinline__ void round_tile(T* to, int first, const Vector<float, 4> (&sums)[LOADS]) const {
    const int thread = threadIdx.x % GROUP_THREADS;
#pragma unroll
    for (int x = 0; x < LOADS; ++x) {
      const int part = (group * LOADS + x) / 8, in_part = (group * LOADS + x) % 8 * 8;
      const int column = (BOXES == 2 ? part * 64 : 0) + in_part + accumulator_column(thread, 0);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + (QUERIES > 64 ? part * 64 : 0) + accumulator_row(thread, 2 * h);
        if (row < args.tq && column < HEAD)
          *reinterpret_cast<unsigned*>(to + row * args.dq_strides[2] + column) =
              rounded_pair<T>(sums[x].at[2 * h] * args.scale, sums[x].at[2 * h + 1] * args.scale);
      }
    }
  }

  // Writes dq of some tiles when all their parts are there.
  __device__ __forceinline__ void round_dq(const Work& work) const {
    const int thread = threadIdx.x % GROUP_THREADS, head = work.rounded_head;
    const int count = min(ROUNDED, args.query_tiles - work.tile);
    const long long first = (long long)head * args.query_tiles + work.tile;
    if (thread < count) {
      const int parts = work.parts(args, work.tile + thread);
      while (parts > 0 && load_acquire(args.counters + first + thread) != parts) {
      }
    }
    named_barrier(GROUP_BARRIER + group, GROUP_THREADS);
    T* const to = args.dq + work.batch * args.dq_strides[0] + head % args.heads * args.dq_strides[1];
    // A group has a half of each tile. The loads of AT_ONCE tiles are issued together.
    constexpr int LOADS = DQ_BYTES / 16 / (GROUPS * GROUP_THREADS), AT_ONCE = 2;
#pragma unroll 1
    for (int i = 0; i < count; i += AT_ONCE) {
      Vector<float, 4> sums[AT_ONCE][LOADS] = {};
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        if (i + j >= count || work.parts(args, work.tile + i + j) == 0) continue;
        const auto* const tile =
            reinterpret_cast<const Vector<float, 4>*>(args.dq_sums + (first + i + j) * (DQ_BYTES / 4));
#pragma unroll
        for (int x = 0; x < LOADS; ++x)
          sums[j][x] = tile[(group * LOADS + x) * GROUP_THREADS + thread];
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) round_tile<LOADS>(to, (work.tile + i + j) * QUERIES, sums[j]);
    }
  }

  __device__ __forceinline__ void run() {
    for (unsigned parity = 0;; parity ^= 1) {
      wait(memory.cleared(), parity);
      const int index = load_word(memory.index());
      if (index < 0) break;
      const Work work(args, index);
      if (work.rounded_head >= 0) {
        round_dq(work);
        if (is_storer()) mbarrier_arrive(memory.unused());
        continue;
      }
      float dk[COLUMNS / 2] = {}, dv[COLUMNS / 2] = {};
      if (const int steps = work.steps(args)) differentiate_all(dk, dv, work, steps);
      store(dk, dv);
    }
    if (is_storer()) tma_wait<0>();  // before this block's shared memory is given away
  }
};

}  // namespace

// Grid: at most one block for each SM. Dynamic shared memory: SHARED_BYTES.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_wgmma_backward(const __grid_constant__ WgmmaBackwardArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Memory shared = {shared_address(memory)};
  if (threadIdx.x == 0) {
    mbarrier_init(shared.loaded(), 1);
    mbarrier_init(shared.cleared(), 1);
    mbarrier_init(shared.unused(), GROUPS + STAGES);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(shared.ds_buffers().full(stage), GROUPS * 4);
      mbarrier_init(shared.ds_buffers().empty(stage), PARTS * 4);
      mbarrier_init(shared.dq_buffers().full(stage), PARTS * 4);
      mbarrier_init(shared.dq_buffers().empty(stage), 1);
    }
    shared.ring().init(GROUPS * 4);
  }
  __syncthreads();
  const int role = group_index();
  if (role == 0) {
    registers_decrease<PRODUCER_REGISTERS>();
    const int warp = __shfl_sync(0xffffffff, (int)threadIdx.x / 32, 0);
    if (warp == 0) Producer{args, shared, elect_one()}.run();
    else if (warp <= STAGES && elect_one()) add_dq(args, shared, warp - 1);
  } else {
    registers_increase<CONSUMER_REGISTERS>();
    Consumer{args, shared, role - 1}.run();
  }
}
