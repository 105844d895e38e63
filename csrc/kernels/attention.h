// HSTU attention over cached keys in pages and new keys in dense rows, on the CPU.
//
// The keys of batch row b have positions: 0 .. paged-1 in pages, then the row's dense rows that are no
// candidates. A history query at position i sees the keys j <= i; a candidate sees all of them and itself.
// See `ops.py` for the operator.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/dtypes.h"

namespace mtserve::kernels {

// Strides count elements. q, k and v are [tokens, heads, dim] with the last dimension contiguous.
struct AttentionProblem {
  DType dtype;
  const void* q;
  const void* k;
  const void* v;
  int64_t q_stride[2];  // token, head
  int64_t k_stride[2];
  int64_t v_stride[2];
  const void*
      table;  // of one layer: pages, each [page_size, heads, qk_dim] and then [page_size, heads, v_dim]
  int64_t page_stride;
  void* out;  // [tokens, heads, v_dim], contiguous
  const int64_t* offsets;
  const int64_t* num_candidates;
  const int64_t* paged_lens;
  const int32_t* page_indices;
  const int32_t* page_indptr;
  int64_t rows;
  int64_t heads;
  int64_t qk_dim;
  int64_t v_dim;
  int64_t page_size;
  float scale;
  float norm_len;
  int64_t max_attn_len;  // 0: all
};

// The instruction set that attention uses for bfloat16 on this processor: "amx", "avx512_bf16", "avx512", "avx2" or
// "baseline"; where it is "amx", other dtypes use AVX-512. The environment variable MTSERVE_CPU_ISA, read once, forbids
// those wider than the one it names. AMX is compared with AVX-512 first; if they differ, it stays unused, and a
// warning on the standard error says so.
const char* attention_isa();

// The work of one call, cut into items that threads take one after the other.
class AttentionPlan {
 public:
  // `problem` must outlive the plan.
  AttentionPlan(const AttentionProblem& problem, int threads);
  ~AttentionPlan();

  // How many threads are worth calling `work`; 0 if there is nothing to do.
  int workers() const;
  // Takes items until none is left. Safe to call from several threads.
  void work();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mtserve::kernels
