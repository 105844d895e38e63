// The attention kernel for bfloat16 on processors that multiply tiles of it (AMX). Compiled for AMX (tiles, bfloat16),
// AVX-512 (F, BW, DQ, VL), FMA and F16C.
//
// For one item and one block of keys, for up to 32 queries at a time:
//   scores  S[query][key] = silu(scale * q . k), from pairs of dims.
//   values  O[query][dim] += S[query][key] * v, from pairs of keys. S is float32 here, too: three bfloat16
//           numbers of 8 bits each are exactly as much. Three products take the place of one.
// Every element of S is one fixed chain over the dims. Every element of O is one over a block's keys, taken by 32
// from its start, where S and v are zero beside the keys: adding zeros changes no bit. So results do not depend on
// the batch. Subnormal numbers count as zero; where a score or a value is not finite, neither is the result.
#include <immintrin.h>

#include "kernels/attention_kernel.h"

#define MTSERVE_LANES 16
#define MTSERVE_TILE_ROWS 32

namespace mtserve::kernels {
namespace {

#include "kernels/attention_vector.inc"
// Behind the vectors that they use:
#include "kernels/attention_pack.inc"
#include "kernels/attention_item.inc"
#include "kernels/attention_amx_tiles.inc"

constexpr int64_t kChunks = kKeyBlock / kStep;

class TiledAttention : Item<BFloat16> {
  // Floats of the working memory's parts.
  struct Sizes {
    int64_t steps;      // of 32 dims of a key
    int64_t out_steps;  // of a value
    int64_t queries, keys, values, parts, square, out;
    explicit Sizes(const AttentionProblem& p)
        : steps((p.qk_dim + kStep - 1) / kStep),
          out_steps((p.v_dim + kStep - 1) / kStep),
          queries(kMaxQueries / 16 * steps * kTile),
          keys(kKeyBlock / 16 * steps * kTile),
          values(out_steps * kChunks * 2 * kTile),
          parts(kChunks * kParts * 2 * kTile),
          square(kTileRows * kStep),
          out(kMaxQueries * out_steps * kStep) {}
  };

 public:
  TiledAttention(const AttentionProblem& problem, const AttentionItem& item, float* scratch)
      : TiledAttention(problem, item, scratch, Sizes(problem)) {}

  static int64_t scratch_floats(const AttentionProblem& p) {
    const Sizes sizes(p);
    return sizes.queries + sizes.keys + sizes.values + sizes.parts + sizes.square + sizes.out;
  }

  void run() {
    const ConfiguredTiles tiles;
    for (int64_t i = 0; i < item_.count * out_row_; ++i) out_[i] = 0;
    for (int64_t t = 0; t < num_tiles_; ++t) {
      pack_query_tiles(dense(p_.q, p_.q_stride, tiles_[t].first), p_.q_stride[0], tiles_[t].rows, p_.qk_dim,
                       queries_ + t * 2 * steps_ * kTile);
    }
    each_block([&](const Block<BFloat16>& block, const Block<BFloat16>& next) {
      pack(block);
      int64_t fetched = next.begin;
      for (int64_t t = 0; t < num_tiles_; ++t) {
        const Tile& tile = tiles_[t];
        const int64_t due = next.begin + (next.end - next.begin) * (t + 1) / num_tiles_;
        prefetch(next.keys + fetched, due - fetched, p_.qk_dim);
        fetched = due;
        if (tile.begin >= tile.end) continue;
        const int64_t first = tile.begin / kStep, last = (tile.end + kStep - 1) / kStep;
        for (int64_t c = first; c < last; ++c) {
          add_scores(tile, queries_ + t * 2 * steps_ * kTile, block, c, parts_ + (c - first) * kParts * 2 * kTile);
        }
        add_values(tile, first, last);
      }
    });
    finish(out_);
  }

 private:
  TiledAttention(const AttentionProblem& problem, const AttentionItem& item, float* scratch, const Sizes& sizes)
      : Item(problem, item, sizes.out_steps * kStep),
        steps_(sizes.steps),
        queries_(scratch),
        keys_(queries_ + sizes.queries),
        values_(keys_ + sizes.keys),
        parts_(values_ + sizes.values),
        square_(parts_ + sizes.parts),
        out_(square_ + sizes.square) {}

  void pack(const Block<BFloat16>& block) {
    for (int64_t c = block.begin / kStep; c * kStep < block.end; ++c) {
      const int64_t column = c * kStep, begin = most(block.begin, column), end = least(block.end, column + kStep);
      prefetch(block.values + begin, end - begin, p_.v_dim);
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t at = column + half * kLanes;
        // What a tile without keys gives is masked.
        if (at + kLanes <= block.begin || at >= block.end) continue;
        pack_key_tiles(block.keys + at, p_.qk_dim, keys_ + (c * steps_ * 2 + half) * kTile, 2 * kTile);
      }
      pack_value_tiles(block.values + column, begin - column, end - column, p_.v_dim, values_ + c * 2 * kTile,
                       kChunks * 2 * kTile);
    }
  }

  // Of the tile's queries and the chunk's 32 keys.
  void add_scores(const Tile& tile, const float* queries, const Block<BFloat16>& block, int64_t chunk, float* parts) {
    const auto multiply = tile.rows > 16 ? score_tiles<2> : score_tiles<1>;
    multiply(queries, keys_ + chunk * steps_ * 2 * kTile, steps_, square_);
    const Vec factor = broadcast(p_.scale);
    for (int64_t i = 0; i < tile.rows * kStep; i += kLanes) store(square_ + i, silu(load(square_ + i) * factor));
    mask(tile, block, chunk * kStep, 2, square_, kStep);
    for (int64_t m = 0; m < tile.rows; ++m) {
      const float* at = square_ + m * kStep;
      cut_scores(load(at), load(at + kLanes), parts + m * kLanes, 2 * kTile);
    }
  }

  // Of the chunks [first, last), whose scores were cut.
  void add_values(const Tile& tile, int64_t first, int64_t last) {
    const auto multiply = tile.rows > 16 ? value_tiles<2> : value_tiles<1>;
    const float* values = values_ + first * 2 * kTile;
    for (int64_t dim = 0; dim < out_row_; dim += kStep) {
      multiply(parts_, values, last - first, square_);
      for (int64_t m = 0; m < tile.rows; ++m) {
        float* at = out_ + (tile.first + m) * out_row_ + dim;
        const float* sums = square_ + m * kStep;
        store(at, load(at) + load(sums));
        store(at + kLanes, load(at + kLanes) + load(sums + kLanes));
      }
      values += kChunks * 2 * kTile;
    }
  }

  const int64_t steps_;
  float* const queries_;  // [tile][16 queries][step] tiles
  float* const keys_;     // [chunk][step][16 keys]
  float* const values_;   // [step of dims][chunk][16 dims]
  float* const parts_;    // [chunk][part][16 queries]
  float* const square_;   // [kTileRows][kStep], one product
  float* const out_;
};

int64_t scratch_floats(const AttentionProblem& p) { return TiledAttention::scratch_floats(p); }

void run(const AttentionProblem& p, const AttentionItem& item, float* scratch) {
  TiledAttention(p, item, scratch).run();
}

}  // namespace

extern const AttentionKernel kAttentionAmx = {"amx", kTileRows, scratch_floats, run};

}  // namespace mtserve::kernels
