// What a block of attention_wgmma_backward.cu does at a time: a tile of keys, or some tiles of dq.
#pragma once

namespace {

// Position of query 0 among the keys.
template <typename Args> __device__ __forceinline__ int shift(const Args& args, int keys) {
  return BAND && args.bottom_right ? keys - args.tq : 0;
}

__device__ __forceinline__ int visible_keys(const int* lengths, int batch, int tk) {
  return lengths ? min(max(lengths[batch], 0), tk) : tk;
}

// A tile of queries of one head.
struct Step { int head, query_tile; };

// A tile of keys, or `rounded_head` and ROUNDED of its tiles of dq from `tile` on. Tiles of keys come by
// sections of heads; in a section the first tiles of all heads come first. The dq of a section is rounded
// behind the next section's tiles: then all its parts are there.
struct Work {
  int tile, batch, kv_head, keys, first_query_tile, last_query_tile, rounded_head = -1;

  __device__ __forceinline__ Work(const WgmmaBackwardArgs& args, int index) {
    const int last_section = (args.kv_heads - 1) / args.section, per_head = rounds(args);
    const int in_section = args.section * args.key_tiles, rounds_in_section = args.section * per_head;
    int section = 0, heads = min(args.section, args.kv_heads);
    if (index >= heads * args.key_tiles && last_section > 0) {
      section = min(1 + (index - in_section) / (in_section + rounds_in_section), last_section);
      index -= in_section + (section - 1) * (in_section + rounds_in_section);
      heads = min(args.section, args.kv_heads - section * args.section);
    }
    int first_head = section * args.section, in_batch = args.heads / args.group;
    if (index < heads * args.key_tiles) {
      tile = index / heads;
    } else {
      index -= heads * args.key_tiles;
      // Behind the last section come the tiles of the section before it, and then its own.
      if (section > 0 && index < rounds_in_section) first_head -= args.section;
      else if (section > 0) index -= rounds_in_section;
      rounded_head = first_head * args.group + index / (per_head / args.group);
      tile = index % (per_head / args.group) * ROUNDED;
      batch = rounded_head / args.heads, kv_head = 0;
      keys = visible_keys(args.lengths, batch, args.tk);
      first_query_tile = last_query_tile = 0;
      return;
    }
    const int head = first_head + index % heads;
    batch = head / in_batch, kv_head = head % in_batch;
    keys = visible_keys(args.lengths, batch, args.tk);
    first_query_tile = args.causal ? tile * (KEYS / QUERIES) : 0;
    last_query_tile = args.query_tiles - 1;
    if (BAND) {
      // Queries before `behind` see the tile's last key, by the window.
      const int position = shift(args, keys), last_key = min((tile + 1) * KEYS, keys) - 1;
      const int behind = min(last_key - position + args.window, args.tq);
      first_query_tile = max(tile * KEYS - position, 0) / QUERIES;
      last_query_tile = behind > 0 ? (behind - 1) / QUERIES : -1;
    }
    if (tile * KEYS >= keys) first_query_tile = args.query_tiles;  // nothing to do
  }

  // Pieces of work that round dq, for each head of keys.
  static __device__ __forceinline__ int rounds(const WgmmaBackwardArgs& args) {
    return args.group * ((args.query_tiles + ROUNDED - 1) / ROUNDED);
  }

  // Number of tiles of queries of a head; not above 0 where no query sees a key of the block.
  __device__ __forceinline__ int query_tiles() const {
    return last_query_tile + 1 - first_query_tile;
  }

  // The number of tiles of keys whose parts of this tile of dq come before the block's.
  __device__ __forceinline__ int rank(const WgmmaBackwardArgs& args, int query_tile) const {
    if (!BAND) return tile;
    return tile - max(query_tile * QUERIES + shift(args, keys) - args.window + 1, 0) / KEYS;
  }
  // The number of parts of a tile of dq: of the tiles of keys that one of its queries sees.
  __device__ __forceinline__ int parts(const WgmmaBackwardArgs& args, int query_tile) const {
    const int position = query_tile * QUERIES + shift(args, keys), behind = position + QUERIES;
    const int seen = args.causal ? min(keys, behind) : keys;
    const int first = BAND ? max(position - args.window + 1, 0) : 0;
    return seen <= 0 || first >= keys ? 0 : (seen - 1) / KEYS - first / KEYS + 1;
  }
  // Steps go over the queries of one head after the other.
  __device__ __forceinline__ int steps(const WgmmaBackwardArgs& args) const {
    return rounded_head < 0 ? max(query_tiles(), 0) * args.group : 0;
  }
  __device__ __forceinline__ Step first_step(const WgmmaBackwardArgs& args) const {
    return {kv_head * args.group, last_query_tile};
  }
  __device__ __forceinline__ void next(Step& step) const {
    if (--step.query_tile < first_query_tile) step.query_tile = last_query_tile, ++step.head;
  }
  __device__ __forceinline__ long long index(const WgmmaBackwardArgs& args, const Step& step) const {
    return ((long long)batch * args.heads + step.head) * args.query_tiles + step.query_tile;
  }
};

}  // namespace
