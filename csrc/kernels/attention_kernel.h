// What the scheduler of `attention.cpp` needs from one instruction set's build of the attention kernel.
#pragma once

#include <cstdint>

#include "kernels/attention.h"

namespace mtserve::kernels {

// Keys are summed up in blocks that start at multiples of this position, for every instruction set, whether
// they come from pages or dense rows: that keeps the order of additions, and so the bits of the result,
// independent of how much of a history was cached.
constexpr int64_t kKeyBlock = 128;
constexpr int64_t kMaxTiles = 8;
constexpr int64_t kMaxTileRows = 32;

// Consecutive dense rows of one batch row, for one head.
struct AttentionItem {
  int64_t row;
  int64_t head;
  int64_t first;  // counted from the batch row's first dense row
  int64_t count;  // at most kMaxTiles * tile_rows
};

struct AttentionKernel {
  const char* isa;
  int64_t tile_rows;  // queries that one register tile holds
  int64_t (*scratch_floats)(const AttentionProblem& problem);
  void (*run)(const AttentionProblem& problem, const AttentionItem& item, float* scratch);
};

extern const AttentionKernel kAttentionBaseline;
#if defined(MTSERVE_X86_KERNELS)
extern const AttentionKernel kAttentionAvx2;
extern const AttentionKernel kAttentionAvx512;
#if defined(MTSERVE_X86_BF16)
extern const AttentionKernel kAttentionAvx512Bf16;
#endif
#if defined(MTSERVE_X86_AMX)
// For bfloat16 alone.
extern const AttentionKernel kAttentionAmx;
#endif
#endif

// Positions of the keys that a dense row sees in pages and history, [first, last); a candidate sees itself
// besides.
struct Visible {
  int64_t first;
  int64_t last;
};

// Not `inline`: the builds for different instruction sets must not share its code.
[[maybe_unused]] static Visible visible_keys(int64_t paged, int64_t history, int64_t dense_row,
                                             int64_t max_attn_len) {
  const bool candidate = dense_row >= history;
  const int64_t position = paged + (candidate ? history : dense_row);
  const int64_t first = max_attn_len > 0 && position > max_attn_len ? position - max_attn_len : 0;
  return {first, candidate ? position : position + 1};
}

}  // namespace mtserve::kernels
