// Attention's forward by Hopper's tensor cores (wgmma, sm_90a): float16 and bfloat16, no dropout.
//
// q, k, v, out (B, H or Hkv, T, HEAD) -> out = softmax(scale q k^T) v and lse (B, H, Tq), in float32.
//
// A block computes tiles of 64 GROUPS queries of one head, and reads the keys KEYS at a time. Warp group 0
// produces: one warp of it fills rings of tiles of k and of v by the copy engine. Groups 1 to GROUPS consume:
// each has 64 queries, which share the rings. A thread has parts of two rows, r and r + 8 (accumulator_row).
//
// For a tile j of keys a group computes scores s(j) = q k(j)^T, weights p(j) = 2^(scale s(j) - top), and
// out += p(j) v(j). Two overlaps keep the tensor cores at work during exponentials:
//   in a group:      s(j + 1) and then p(j) v(j) are issued; p(j + 1) is computed while p(j) v(j) runs;
//   between groups:  they issue their products in turns, so that one group's products run during the
//                    exponentials of another. Without PINGPONG they issue them as they come.
// With two QUERY_SLOTS the producer loads the next tile's queries and its first keys while the groups still
// compute this one. With one slot it waits for the last group's products first.
// Weights are rounded to T and stay in registers, as the first factor of the second product. v is its second
// factor as it is stored (MN-major). Bytes: q read and out written once; k and v once by each block, mostly
// from the L2.
//
// With NARROW_END a group whose queries see at most half of their last tile of keys computes that half alone:
// with a causal mask every other group of 64 queries.
//
// BAND compiles a causal mask with a window or at the bottom right: a query sees a band of keys (mask.py),
// tiles of keys before the band are skipped like those behind it, and a query may see no key. SOFTCAP
// replaces scores by tanh(cap_scale s) before the mask. Sources: FlashAttention-3 (arXiv:2407.08608),
// online softmax (arXiv:1805.02867).
#include "hopper/barrier.cuh"
#include "hopper/warp_roles.cuh"
#include "hopper/wgmma.cuh"
#include "hopper/wgmma_register_shapes.cuh"
#include "hopper/wgmma_score_shapes.cuh"
#include "numeric.cuh"

#ifndef HEAD
#define HEAD 128
#define KEYS 128
#define GROUPS 2
#define OUT_IN_Q 0
#define QUERY_SLOTS 1
#define STAGES 2
#define PINGPONG 1
#define NARROW_END 0
#define BAND 0
#define SOFTCAP 0
#endif

using namespace hopper;
using T = WEFT_T;

namespace {

// Boxes of 64 columns that hold a row in shared memory; columns from HEAD on are 0. A tile is its boxes, one
// after the other. The products do only as many columns as they need: steps of 16, WIDTH for the values.
constexpr int BOXES = (HEAD + 63) / 64, D_STEPS = (HEAD + 15) / 16;
constexpr int WIDTH = HEAD > 192 ? 256 : HEAD > 128 ? 192 : HEAD > 96 ? 128 : HEAD > 80 ? 96
                      : HEAD > 64 ? 80 : 64;
constexpr int ROWS = 64, BLOCK_ROWS = ROWS * GROUPS;  // queries of a group and of a block
constexpr int THREADS = GROUP_THREADS * (1 + GROUPS);
constexpr int NARROW_KEYS = KEYS / 32 * 16;  // half a tile of keys, in whole steps of a product
constexpr int ROW_BOX = ROWS * 128, KEY_BOX = KEYS * 128;             // bytes of a box
constexpr int ROW_TILE = BOXES * ROW_BOX, KEY_TILE = BOXES * KEY_BOX;  // bytes of a tile
// Shared memory: slots of q of each group, out of each group (with OUT_IN_Q in the place of its q), k, v,
// barriers.
constexpr int QUERY_TILES = GROUPS * QUERY_SLOTS;
constexpr int OUT_AT = OUT_IN_Q ? 0 : QUERY_TILES * ROW_TILE, K_AT = OUT_AT + GROUPS * ROW_TILE;
constexpr int V_AT = K_AT + STAGES * KEY_TILE, BARRIERS_AT = V_AT + STAGES * KEY_TILE;
constexpr int TASKS_AT = BARRIERS_AT + Pipeline<QUERY_TILES>::BYTES + 2 * Pipeline<STAGES>::BYTES;
constexpr int TAIL_AT = TASKS_AT + QUERY_TILES * 8, SHARED_BYTES = TAIL_AT + 8;
// Together 64,512 (two groups) and 65,536 (three) of an SM's 65,536 registers. The producer spills with 24.
constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 40, CONSUMER_REGISTERS = GROUPS == 3 ? 160 : 232;
static_assert(GROUPS >= 2 && GROUPS <= 3, "the registers are divided for two or three groups");
static_assert(QUERY_SLOTS == 1 || (QUERY_SLOTS == 2 && !OUT_IN_Q), "outputs are staged in a single slot");
static_assert(!NARROW_END || !OUT_IN_Q, "queries in the place of outputs are released after the outputs");
static_assert(STAGES >= 2, "the next tile of keys is loaded while one is read");
static_assert(KEYS % 16 == 0 && SHARED_BYTES <= 227 << 10, "too much shared memory");

constexpr int TURN_BARRIER = 1, GROUP_BARRIER = 1 + GROUPS;  // named barriers, one of each for a group
constexpr float LN2 = 0.6931471805599453f;
// A macro, since NVRTC has no <limits> and a constexpr float cannot be made from bits.
#define INFINITE __int_as_float(0x7f800000)

}  // namespace

#include "attention_wgmma_softmax.cuh"

// attention_wgmma.py declares the same fields in the same order.
struct alignas(64) WgmmaAttentionArgs {
  TensorMap q, k, v, out;  // (HEAD, T, heads, B): boxes of 64 columns, and ROWS or KEYS rows
  float* lse;
  const int* lengths;  // (B,): visible keys of each batch; null: all
  int* counter;        // 0: number of tiles of queries taken so far, beside the first of each block; or null
  int batches, heads, group, tq, tk;  // `group` query heads share one head of keys
  int causal, row_tiles;              // tiles of queries of a head
  int section;                        // heads (of all batches) that are computed side by side
  float scale_log2;                   // factor of what is exponentiated, times log2(e); above 0
  int window, bottom_right;           // with BAND: a window of at most tq + tk keys
  float cap_scale;                    // with SOFTCAP: 2 log2(e) scale / cap
};

namespace {

// A tile of queries of one head.
struct Task { int start, head, batch, keys, key_tiles, first_key_tile; };

// Position of query 0 among the keys.
__device__ __forceinline__ int shift(const WgmmaAttentionArgs& args, int keys) {
  return BAND && args.bottom_right ? keys - args.tq : 0;
}

// End of the tiles of keys that the queries of a group, from `first` on, see. A group beyond the last query
// sees none.
__device__ __forceinline__ int key_tiles(const WgmmaAttentionArgs& args, int first, int keys) {
  if (first >= args.tq) return 0;
  const int behind = BAND ? max(first + ROWS + shift(args, keys), 0) : first + ROWS;
  return ((args.causal ? min(keys, behind) : keys) + KEYS - 1) / KEYS;
}

// The first tile of keys that the queries from `first` on see; at or behind the end where they see none.
__device__ __forceinline__ int first_key_tile(const WgmmaAttentionArgs& args, int first, int keys) {
  return BAND ? max(first + shift(args, keys) - args.window + 1, 0) / KEYS : 0;
}

// Tiles come by sections of heads, whose k and v fit in the L2 cache together. In a section, causal tiles
// come with the last queries first: they have the most keys, so that the grid's last tiles are short.
// Otherwise the tiles of a head follow each other.
__device__ __forceinline__ Task task_at(const WgmmaAttentionArgs& args, int index) {
  const int in_section = args.section * args.row_tiles, section = index / in_section;
  const int within = index - section * in_section, first_head = section * args.section;
  const int heads = min(args.section, args.batches * args.heads - first_head);
  const int row_tile = args.causal ? args.row_tiles - 1 - within / heads : within % args.row_tiles;
  const int head = first_head + (args.causal ? within % heads : within / args.row_tiles);
  Task task = {row_tile * BLOCK_ROWS, head % args.heads, head / args.heads};
  // A length from the device cannot be checked by the host without a wait: it is clamped.
  task.keys = args.lengths ? min(max(args.lengths[task.batch], 0), args.tk) : args.tk;
  const int last_group = min(GROUPS - 1, (args.tq - 1 - task.start) / ROWS);
  task.key_tiles = key_tiles(args, task.start + last_group * ROWS, task.keys);
  // Both bounds rise with the queries: the first group has the first tile, the last group the last one.
  task.first_key_tile = BAND ? min(first_key_tile(args, task.start, task.keys), task.key_tiles) : 0;
  return task;
}

// The place of a group's slot among the block's tiles of queries.
__device__ __forceinline__ int query_tile(int group, int slot) {
  return QUERY_SLOTS == 1 ? group : slot * GROUPS + group;
}

// Addresses of a block's shared memory and its barriers.
struct Memory {
  unsigned base;

  // `query_tile`: a group's slot of queries, see query_tile().
  __device__ __forceinline__ unsigned q(int query_tile) const { return base + query_tile * ROW_TILE; }
  __device__ __forceinline__ unsigned out(int group) const { return base + OUT_AT + group * ROW_TILE; }
  __device__ __forceinline__ unsigned k(int stage) const { return base + K_AT + stage * KEY_TILE; }
  __device__ __forceinline__ unsigned v(int stage) const { return base + V_AT + stage * KEY_TILE; }
  __device__ __forceinline__ Pipeline<STAGES> keys() const { return {base + BARRIERS_AT}; }
  __device__ __forceinline__ Pipeline<STAGES> values() const {
    return {base + BARRIERS_AT + Pipeline<STAGES>::BYTES};
  }
  // Each slot of each group has barriers of its own: for its q, and the number of the tile that it is of.
  __device__ __forceinline__ Pipeline<QUERY_TILES> queries() const {
    return {base + BARRIERS_AT + 2 * Pipeline<STAGES>::BYTES};
  }
  __device__ __forceinline__ unsigned task(int query_tile) const { return base + TASKS_AT + query_tile * 8; }
  __device__ __forceinline__ unsigned tail() const { return base + TAIL_AT; }
};

// ---- Producer

// Loads a tile of ROWS_OF_BOX rows of a head from `row` on; its bytes count on `barrier`.
template <int ROWS_OF_BOX>
__device__ __forceinline__ void load_tile(unsigned to, const TensorMap* map, int row, int head, int batch,
                                          unsigned barrier) {
#pragma unroll
  for (int box = 0; box < BOXES; ++box)
    tma_load(to + box * ROWS_OF_BOX * 128, map, box * 64, row, head, batch, barrier);
}

// One warp runs it. All its lanes go along, because all clear a tail; `issuer` is one of them.
struct Producer {
  const WgmmaAttentionArgs& args;
  Memory memory;
  bool issuer;
  RingPosition<STAGES> k_ring, v_ring;
  RingPosition<QUERY_SLOTS> q_ring;
  unsigned tail_parity = 0;

  // Gives each group its queries of tile `index`; -1: there are no more.
  __device__ __forceinline__ void load_queries(int index, const Task& task) {
    for (int group = 0; issuer && group < GROUPS; ++group) {
      const int tile = query_tile(group, q_ring.stage);
      const unsigned full = memory.queries().full(tile);
      wait(memory.queries().empty(tile), q_ring.parity ^ 1);
      store_word(memory.task(tile), index);
      if (index < 0) {
        mbarrier_arrive(full);
      } else {
        mbarrier_arrive_expect(full, ROW_TILE);
        load_tile<ROWS>(memory.q(tile), &args.q, task.start + group * ROWS, task.head, task.batch, full);
      }
    }
    q_ring.next();
  }

  // Blocks take tiles as they need them where the work of tiles differs, and else every gridDim.x-th.
  __device__ __forceinline__ int next_index(int index) const {
    if (!args.counter) return index + gridDim.x;
    int taken = 0;
    if (threadIdx.x % 32 == 0) taken = atomicAdd(args.counter, 1);
    return __shfl_sync(0xffffffff, taken, 0) + gridDim.x;
  }

  __device__ __forceinline__ void load_keys(const Task& task, int j) {
    if (issuer) {
      memory.keys().begin_fill(k_ring, KEY_TILE);
      load_tile<KEYS>(memory.k(k_ring.stage), &args.k, j * KEYS, task.head / args.group, task.batch,
                      memory.keys().full(k_ring.stage));
    }
    k_ring.next();
  }

  __device__ __forceinline__ void load_values(const Task& task, int j) {
    const unsigned to = memory.v(v_ring.stage), full = memory.values().full(v_ring.stage);
    const int first_row = j * KEYS, kv_head = task.head / args.group;
    if (first_row + KEYS <= task.keys || task.keys == args.tk) {
      if (issuer) {
        memory.values().begin_fill(v_ring, KEY_TILE);
        load_tile<KEYS>(to, &args.v, first_row, kv_head, task.batch, full);
      }
    } else {
      // Values past a batch's length may be NaN, and 0 times NaN is NaN: their rows are set to 0 here, and
      // the tile becomes full by this warp's arrival, behind a fence of the proxy.
      if (issuer) {
        wait(memory.values().empty(v_ring.stage), v_ring.parity ^ 1);
        mbarrier_arrive_expect(memory.tail(), KEY_TILE);
        load_tile<KEYS>(to, &args.v, first_row, kv_head, task.batch, memory.tail());
      }
      __syncwarp();  // no lane waits for this phase of the barrier before its bytes are announced
      wait(memory.tail(), tail_parity);
      tail_parity ^= 1;
      const int first_hidden = task.keys - first_row;
      for (int chunk = first_hidden * 8 + threadIdx.x % 32; chunk < KEYS * 8; chunk += 32)
#pragma unroll
        for (int box = 0; box < BOXES; ++box) store_zeros(to + box * KEY_BOX + chunk * 16);
      fence_async_proxy();
      __syncwarp();
      if (issuer) mbarrier_arrive(full);
    }
    v_ring.next();
  }

  __device__ __forceinline__ void run() {
    if (issuer) tma_prefetch(&args.q), tma_prefetch(&args.k), tma_prefetch(&args.v);
    const int count = args.row_tiles * args.heads * args.batches;
    for (int index = blockIdx.x; index < count;) {
      const Task task = task_at(args, index);
      load_queries(index, task);
      // In the order in which the consumers use them: k(0), k(1), v(0), k(2), v(1), ...
      for (int j = task.first_key_tile; j <= task.key_tiles; ++j) {
        if (j < task.key_tiles) load_keys(task, j);
        if (j > task.first_key_tile) load_values(task, j - 1);
      }
      index = next_index(index);
    }
    load_queries(-1, {});
  }
};

// ---- Consumers

// Issues s = q k^T for the first 2 COUNT keys of a tile.
template <int COUNT>
__device__ __forceinline__ void multiply_keys(float (&s)[COUNT], unsigned q, unsigned k) {
  const unsigned long long rows = descriptor<K_MAJOR>(q), columns = descriptor<K_MAJOR>(k);
#pragma unroll
  for (int step = 0; step < D_STEPS; ++step) {
    const int box = step / 4, in_box = step % 4 * K_STEP_BYTES<K_MAJOR>;
    Wgmma<T, K_MAJOR, K_MAJOR, 2 * COUNT>::run(s, advance(rows, box * ROW_BOX + in_box),
                                          advance(columns, box * KEY_BOX + in_box), step > 0);
  }
  wgmma_commit();
}

// Issues out += p v for the first 16 STEPS keys of a tile.
template <int STEPS>
__device__ __forceinline__ void multiply_values(float (&out)[WIDTH / 2], const unsigned (&p)[STEPS][4],
                                                unsigned v) {
  const unsigned long long rows = descriptor<MN_MAJOR, KEY_BOX>(v);
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    WgmmaFromRegisters<T, MN_MAJOR, WIDTH>::run(out, p[step],
                                                advance(rows, step * K_STEP_BYTES<MN_MAJOR>), 1);
  wgmma_commit();
}

struct Consumer {
  const WgmmaAttentionArgs& args;
  Memory memory;
  int group;
  RingPosition<STAGES> k_ring, v_ring;
  RingPosition<QUERY_SLOTS> q_ring;  // of the next queries
  int q_slot = 0;                    // of the queries that the group computes

  __device__ __forceinline__ bool is_first_lane() const { return threadIdx.x % 32 == 0; }
  // The thread that stores: copies are waited for by the thread that issued them.
  __device__ __forceinline__ bool is_storer() const { return threadIdx.x % GROUP_THREADS == 0; }

  __device__ __forceinline__ int q_tile() const { return query_tile(group, q_slot); }

  // Waits for the group's next queries and returns the number of their tile.
  __device__ __forceinline__ int next_index() {
    q_slot = q_ring.stage;
    memory.queries().wait_full({q_tile(), q_ring.parity});
    q_ring.next();
    const int index = load_word(memory.task(q_tile()));
    __syncwarp();  // all lanes have read it before one of them frees it
    return index;
  }

  // Groups issue their products in turns: each waits for its turn and, when its products are issued, passes
  // it to the next group. At a barrier 128 threads wait and 128 arrive.
  __device__ __forceinline__ void take_turn() const {
    if (PINGPONG) named_barrier(TURN_BARRIER + group, 2 * GROUP_THREADS);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (PINGPONG) named_barrier_arrive(TURN_BARRIER + (group + 1) % GROUPS, 2 * GROUP_THREADS);
  }

  __device__ __forceinline__ void release_keys() {
    if (is_first_lane()) memory.keys().release(k_ring.stage);
    k_ring.next();
  }
  __device__ __forceinline__ void release_values() {
    if (is_first_lane()) memory.values().release(v_ring.stage);
    v_ring.next();
  }

  // Masks the scores of tile j where one of the group's queries, from `first` on, does not see all its keys.
  template <int COUNT>
  __device__ __forceinline__ void mask_tile(float (&s)[COUNT], const Task& task, int first, int j) const {
    const int position = first + shift(args, task.keys);  // of the group's first query
    const bool is_cut = BAND && j * KEYS < position + ROWS - args.window;
    if (!is_cut && (j + 1) * KEYS <= (args.causal ? min(task.keys, position + 1) : task.keys)) return;
    const int thread = threadIdx.x % GROUP_THREADS, column = j * KEYS + accumulator_column(thread, 0);
    int left[2], begin[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = position + accumulator_row(thread, 2 * h);
      left[h] = (args.causal ? min(task.keys, row + 1) : task.keys) - column;
      begin[h] = BAND ? row + 1 - args.window - column : 0;
    }
    mask(s, left, begin);
  }

  // True if the group's queries see at most half of the keys of tile `j`, their last.
  __device__ __forceinline__ bool is_narrow(const Task& task, int first, int j) const {
    const int behind = first + ROWS + shift(args, task.keys);  // of the last query's keys
    return (args.causal ? min(task.keys, behind) : task.keys) <= j * KEYS + NARROW_KEYS;
  }

  // Does what attend() does for the group's last tile `j` of keys, of which only half is computed. FOLLOWS:
  // `p` has weights of the tile before it.
  template <bool FOLLOWS>
  __device__ __forceinline__ void attend_narrow(float (&out)[WIDTH / 2], Softmax& softmax,
                                                unsigned (&p)[KEYS / 16][4], const Task& task, int first,
                                                int j) {
    float s[NARROW_KEYS / 2], shrink[2];
    unsigned narrow[NARROW_KEYS / 16][4];
    const bool has_turn = FOLLOWS || (BAND && j > task.first_key_tile);
    memory.keys().wait_full(k_ring);
    if (has_turn) take_turn();
    wgmma_fence();
    multiply_keys(s, memory.q(q_tile()), memory.k(k_ring.stage));
    if constexpr (FOLLOWS) {
      memory.values().wait_full(v_ring);
      wgmma_fence();
      multiply_values(out, p, memory.v(v_ring.stage));
    }
    if (has_turn) pass_turn();
    wgmma_wait<FOLLOWS ? 1 : 0>();
    pin_registers(s);
    release_keys();
    if (is_first_lane()) memory.queries().release(q_tile());  // the group's last product with q is complete
    cap(s, args.cap_scale);
    mask_tile(s, task, first, j);
    // As in the loop of attend(): the wait stands in both branches.
    if (softmax.weigh(s, args.scale_log2, shrink) && FOLLOWS) {
      wgmma_wait<0>(), pin_registers(out);
#pragma unroll
      for (int n = 0; n < WIDTH / 2; ++n) out[n] *= shrink[n / 2 % 2];
    }
    if constexpr (FOLLOWS) {
      pin_registers(s);  // else half of the powers come behind the wait
      wgmma_wait<0>(), pin_registers(out), pin_registers(p);
      release_values();
    }
    round_weights(narrow, s);
    memory.values().wait_full(v_ring), wgmma_fence();
    multiply_values(out, narrow, memory.v(v_ring.stage));
    wgmma_wait<0>(), pin_registers(out), pin_registers(narrow);
    release_values();
  }

  // Adds the outputs of the tiles of keys `begin` to `end` - 1, not yet divided by the totals. `first` is the
  // group's first query.
  __device__ __forceinline__ void attend(float (&out)[WIDTH / 2], Softmax& softmax, const Task& task,
                                         int first, int begin, int end) {
    const unsigned q = memory.q(q_tile());
    float s[KEYS / 2], shrink[2];
    unsigned p[KEYS / 16][4];
    const bool has_narrow_end = NARROW_END && is_narrow(task, first, end - 1);
    if constexpr (NARROW_END)
      if (has_narrow_end && begin == --end) return attend_narrow<false>(out, softmax, p, task, first, end);
    const bool has_turn = BAND && begin > task.first_key_tile;  // of the block's tiles all but the first
    memory.keys().wait_full(k_ring);
    if (has_turn) take_turn();
    wgmma_fence();
    multiply_keys(s, q, memory.k(k_ring.stage));
    if (has_turn) pass_turn();
    wgmma_wait<0>();
    pin_registers(s);
    release_keys();
    cap(s, args.cap_scale);
    mask_tile(s, task, first, begin);
    softmax.weigh(s, args.scale_log2, shrink);  // out is still 0: there is nothing to rescale
    round_weights(p, s);
#pragma unroll 1
    for (int j = begin + 1; j < end; ++j) {
      memory.keys().wait_full(k_ring);
      take_turn();
      wgmma_fence();
      multiply_keys(s, q, memory.k(k_ring.stage));
      memory.values().wait_full(v_ring);
      wgmma_fence();
      multiply_values(out, p, memory.v(v_ring.stage));
      pass_turn();
      wgmma_wait<1>();  // the scores; the values' product runs on
      pin_registers(s);
      release_keys();
      cap(s, args.cap_scale);
      mask_tile(s, task, first, j);
      // The wait stands in both branches: ptxas moves it up to the beginning of its basic block, which must
      // not be that of the exponentials.
      if (softmax.weigh(s, args.scale_log2, shrink)) {
        wgmma_wait<0>();
        pin_registers(out);
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) out[i] *= shrink[i / 2 % 2];
      }
      wgmma_wait<0>();
      pin_registers(out);
      pin_registers(p);
      release_values();
      round_weights(p, s);
    }
    if constexpr (NARROW_END)
      if (has_narrow_end) return attend_narrow<true>(out, softmax, p, task, first, end);
    // All products that read q are complete.
    if (!OUT_IN_Q && is_first_lane()) memory.queries().release(q_tile());
    memory.values().wait_full(v_ring);
    wgmma_fence();
    multiply_values(out, p, memory.v(v_ring.stage));
    wgmma_wait<0>();
    pin_registers(out);
    pin_registers(p);
    release_values();
  }

  // Frees tiles of keys that only other groups' queries see. The group passes the turns of these tiles on.
  __device__ __forceinline__ void skip(const Task& task, int from, int to) {
    for (int j = from; j < to; ++j) {
      if (j > task.first_key_tile) take_turn(), pass_turn();
      memory.keys().wait_full(k_ring);
      release_keys();
      memory.values().wait_full(v_ring);  // else the arrival could count for the fill before this one
      release_values();
    }
  }

  // Writes out and the log-sum-exp of the group's rows from `first` on.
  __device__ __forceinline__ void store(float (&out)[WIDTH / 2], const Softmax& softmax, const Task& task,
                                        int first) const {
    const int thread = threadIdx.x % GROUP_THREADS, lane = thread % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // A row without visible keys has top -inf and divisor 1: its lse is -inf, and its output 0.
      const float divisor = softmax.divisor(h), factor = __fdividef(1.0f, divisor);
      const int row = first + accumulator_row(thread, 2 * h);
      if (lane % 4 == 0 && row < args.tq)
        args.lse[((long long)task.batch * args.heads + task.head) * args.tq + row] =
            (softmax.top[h] + log2f(divisor)) * LN2;
#pragma unroll
      for (int i = 0; i < WIDTH / 4; ++i) out[i / 2 * 4 + h * 2 + i % 2] *= factor;
    }
    // The buffer is free once the last tile's store has read it, or, with OUT_IN_Q, all warps' products.
    if (!OUT_IN_Q && is_storer()) tma_wait_read<0>();
    named_barrier(GROUP_BARRIER + group, GROUP_THREADS);
    // Lane l gives the address of row l % 16 of the warp's 16, in column 8 (l / 16) of each 16.
    const int row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int pair = 0; pair < WIDTH / 16; ++pair) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 8; i += 2) words[i / 2] = rounded_pair<T>(out[pair * 8 + i], out[pair * 8 + i + 1]);
      const int chunk = (pair % 4 * 2 + lane / 16) ^ (row & 7);
      store_matrices(memory.out(group) + pair / 4 * ROW_BOX + row * 128 + chunk * 16, words[0], words[1],
                     words[2], words[3]);
    }
    fence_async_proxy();
    named_barrier(GROUP_BARRIER + group, GROUP_THREADS);
    if (is_storer() && first < args.tq) {
#pragma unroll
      for (int box = 0; box < BOXES; ++box)
        tma_store(&args.out, memory.out(group) + box * ROW_BOX, box * 64, first, task.head, task.batch);
      tma_commit();
      if (OUT_IN_Q) tma_wait_read<0>();
    }
    if (OUT_IN_Q) {
      named_barrier(GROUP_BARRIER + group, GROUP_THREADS);
      if (is_first_lane()) memory.queries().release(q_tile());
    }
  }

  __device__ __forceinline__ void run() {
    if (group == GROUPS - 1) pass_turn();  // the first turn is group 0's
    for (int index = next_index(); index >= 0; index = next_index()) {
      const Task task = task_at(args, index);
      const int first = task.start + group * ROWS;
      int begin = 0, end = key_tiles(args, first, task.keys);
      if (BAND) {
        end = max(end, task.first_key_tile);  // of a group beyond the last query
        begin = min(first_key_tile(args, first, task.keys), end);
      }
      float out[WIDTH / 2] = {};
      Softmax softmax;
      if (BAND) skip(task, task.first_key_tile, begin);
      if (begin < end) attend(out, softmax, task, first, begin, end);
      else if (!OUT_IN_Q && is_first_lane()) memory.queries().release(q_tile());
      skip(task, end, task.key_tiles);
      store(out, softmax, task, first);
    }
    if (is_storer()) tma_wait<0>();  // before this block's shared memory is given away
  }
};

}  // namespace

// Grid: at most one block for each SM. Dynamic shared memory: SHARED_BYTES.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_wgmma(const __grid_constant__ WgmmaAttentionArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Memory shared = {shared_address(memory)};
  if (threadIdx.x == 0) {
    mbarrier_init(shared.tail(), 1);
    shared.keys().init(GROUPS * 4);  // one arrival of each warp frees a stage
    shared.values().init(GROUPS * 4);
    shared.queries().init(4);
  }
  __syncthreads();
  const int role = group_index();
  if (role == 0) {
    registers_decrease<PRODUCER_REGISTERS>();
    const int warp = __shfl_sync(0xffffffff, (int)threadIdx.x / 32, 0);
    if (warp == 0) Producer{args, shared, elect_one()}.run();
  } else {
    registers_increase<CONSUMER_REGISTERS>();
    Consumer{args, shared, role - 1}.run();
  }
}
