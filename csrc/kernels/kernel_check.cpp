#include "kernels/kernel_check.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace mtserve::kernels {
namespace {

constexpr int64_t kHeads = 2, kQkDim = 72, kVDim = 40, kPageSize = 16, kPaged = 170, kCandidates = 5;
// The items have tiles of 16 queries or fewer and of more than that.
constexpr int64_t kDense = 45, kItem = 33;
constexpr int64_t kPages = (kPaged + kPageSize - 1) / kPageSize;
constexpr int64_t kPageStride = kPageSize * kHeads * (kQkDim + kVDim);

float widen(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Numbers in [-1, 1).
std::vector<uint16_t> numbers(int64_t count, uint64_t& state) {
  std::vector<uint16_t> out(static_cast<size_t>(count));
  for (uint16_t& x : out) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const float value = static_cast<float>(static_cast<int64_t>(state >> 40) - (1 << 23)) / (1 << 23);
    x = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  }
  return out;
}

std::vector<uint16_t> run(const AttentionKernel& kernel, AttentionProblem problem) {
  std::vector<uint16_t> out(static_cast<size_t>(kDense * kHeads * kVDim));
  problem.out = out.data();
  constexpr std::align_val_t kAlign{64};
  const auto bytes = static_cast<size_t>(kernel.scratch_floats(problem)) * sizeof(float);
  auto* scratch = static_cast<float*>(::operator new(bytes, kAlign));
  std::fill_n(scratch, bytes / sizeof(float), 0.0f);
  for (int64_t first = 0; first < kDense;) {
    const int64_t count = std::min({kItem, kDense - first, kMaxTiles * kernel.tile_rows});
    for (int64_t head = 0; head < kHeads; ++head) kernel.run(problem, {0, head, first, count}, scratch);
    first += count;
  }
  ::operator delete(scratch, kAlign);
  return out;
}

}  // namespace

bool kernels_agree(const AttentionKernel& kernel, const AttentionKernel& trusted) {
  uint64_t state = 20;
  const auto q = numbers(kDense * kHeads * kQkDim, state), k = numbers(kDense * kHeads * kQkDim, state);
  const auto v = numbers(kDense * kHeads * kVDim, state), table = numbers(kPages * kPageStride, state);
  int32_t pages[kPages];
  for (int64_t i = 0; i < kPages; ++i) pages[i] = static_cast<int32_t>(i * 3 % kPages);
  const int64_t offsets[] = {0, kDense}, candidates[] = {kCandidates}, paged[] = {kPaged};
  const int32_t indptr[] = {0, static_cast<int32_t>(kPages)};
  AttentionProblem problem{};
  problem.dtype = DType::kBFloat16;
  problem.q = q.data();
  problem.k = k.data();
  problem.v = v.data();
  problem.table = table.data();
  for (int64_t* stride : {problem.q_stride, problem.k_stride}) {
    stride[0] = kHeads * kQkDim;
    stride[1] = kQkDim;
  }
  problem.v_stride[0] = kHeads * kVDim;
  problem.v_stride[1] = kVDim;
  problem.page_stride = kPageStride;
  problem.offsets = offsets;
  problem.num_candidates = candidates;
  problem.paged_lens = paged;
  problem.page_indices = pages;
  problem.page_indptr = indptr;
  problem.rows = 1;
  problem.heads = kHeads;
  problem.qk_dim = kQkDim;
  problem.v_dim = kVDim;
  problem.page_size = kPageSize;
  problem.scale = 0.25f;
  problem.norm_len = 100.0f;
  problem.max_attn_len = 60;

  const auto mine = run(kernel, problem), theirs = run(trusted, problem);
  float largest = 0;
  for (const uint16_t x : theirs) largest = std::max(largest, std::fabs(widen(x)));
  if (!(largest > 0)) return false;
  for (size_t i = 0; i < mine.size(); ++i) {
    // The last bit of a result that lies near a tie, and the error of float32 where values cancel.
    const float allowed = 0x1p-7f * std::fabs(widen(theirs[i])) + 1e-5f * largest;
    if (!(std::fabs(widen(mine[i]) - widen(theirs[i])) <= allowed)) return false;
  }
  return true;
}

}  // namespace mtserve::kernels
