#include "kernels/attention.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <new>
#include <string_view>
#include <vector>

#include "kernels/amx_support.h"
#include "kernels/attention_kernel.h"
#include "kernels/kernel_check.h"

namespace mtserve::kernels {
namespace {

// From the narrowest on.
constexpr std::string_view kIsas[] = {"baseline", "avx2", "avx512", "avx512_bf16", "amx"};

// Whether MTSERVE_CPU_ISA allows it; anything that is no instruction set allows all.
[[maybe_unused]] bool allowed(std::string_view isa) {
  const char* limit = std::getenv("MTSERVE_CPU_ISA");
  const auto end = std::end(kIsas), widest = std::find(std::begin(kIsas), end, limit == nullptr ? "" : limit);
  return widest == end || std::find(std::begin(kIsas), end, isa) <= widest;
}

// What bfloat16 uses where no tiles are multiplied, and all other dtypes.
const AttentionKernel& choose_vectors() {
#if defined(MTSERVE_X86_KERNELS)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#if defined(MTSERVE_X86_BF16)
  if (avx512 && __builtin_cpu_supports("avx512bf16") && allowed("avx512_bf16")) return kAttentionAvx512Bf16;
#endif
  if (avx512 && allowed("avx512")) return kAttentionAvx512;
  if (avx2 && allowed("avx2")) return kAttentionAvx2;
#endif
  return kAttentionBaseline;
}

struct Kernels {
  const AttentionKernel& others;
  const AttentionKernel& bfloat16;
};

Kernels choose_kernels() {
  const AttentionKernel& vectors = choose_vectors();
#if defined(MTSERVE_X86_AMX) && defined(MTSERVE_X86_BF16)
  if (&vectors == &kAttentionAvx512Bf16 && allowed("amx") && request_amx()) {
    if (kernels_agree(kAttentionAmx, kAttentionAvx512Bf16)) return {vectors, kAttentionAmx};
    std::fputs("mtserve: warning: attention by AMX differs from that by AVX-512 on this processor and is not used\n",
               stderr);
  }
#endif
  return {vectors, vectors};
}

const Kernels& chosen_kernels() {
  static const Kernels kernels = choose_kernels();
  return kernels;
}

// A thread's working memory: it grows and stays, so that no item allocates.
class Scratch {
 public:
  float* reserve(int64_t floats) {
    if (floats > size_) {
      free();
      data_ = static_cast<float*>(::operator new(static_cast<size_t>(floats) * sizeof(float), kAlign));
      size_ = floats;
    }
    return data_;
  }
  ~Scratch() { free(); }

 private:
  static constexpr std::align_val_t kAlign{64};
  void free() {
    if (data_ != nullptr) ::operator delete(data_, kAlign);
    data_ = nullptr;
    size_ = 0;
  }
  float* data_ = nullptr;
  int64_t size_ = 0;
};

// Queries of one batch row; one item per head.
struct Block {
  int64_t row;
  int64_t first;
  int64_t count;
  double cost;
};

// Below this many multiply-adds a thread costs more than it saves.
constexpr double kWorthAThread = 1 << 20;

// Packing the keys for an item costs about as much as so many queries.
constexpr double kPackingQueries = 4;

}  // namespace

struct AttentionPlan::State {
  const AttentionProblem& problem;
  const AttentionKernel& kernel;
  std::vector<Block> blocks;
  int workers = 0;
  std::atomic<int64_t> next{0};

  State(const AttentionProblem& p, const AttentionKernel& k) : problem(p), kernel(k) {}

  // Tiles of queries per item: as many as leave each thread several items, because all queries of an item
  // share the packing of their keys. The result does not depend on it.
  int64_t choose_tiles(int threads) const {
    if (threads == 1) return kMaxTiles;
    int64_t tiles = kMaxTiles;
    for (; tiles > 1; tiles /= 2) {
      const int64_t queries = tiles * kernel.tile_rows;
      int64_t items = 0;
      for (int64_t b = 0; b < problem.rows; ++b) {
        items += (problem.offsets[b + 1] - problem.offsets[b] + queries - 1) / queries;
      }
      if (items * problem.heads >= int64_t{4} * threads) break;
    }
    return tiles;
  }

  double cut(int64_t tiles) {
    const int64_t limit = tiles * kernel.tile_rows;
    double total = 0;
    for (int64_t b = 0; b < problem.rows; ++b) {
      const int64_t dense = problem.offsets[b + 1] - problem.offsets[b];
      const int64_t history = dense - problem.num_candidates[b];
      const int64_t parts = (dense + limit - 1) / limit;
      for (int64_t i = 0; i < parts; ++i) {
        const int64_t first = i * dense / parts, last = (i + 1) * dense / parts;
        const auto top = visible_keys(problem.paged_lens[b], history, first, problem.max_attn_len);
        const auto bottom = visible_keys(problem.paged_lens[b], history, last - 1, problem.max_attn_len);
        const double keys = static_cast<double>(bottom.last - top.first + 1);
        const double cost = keys * (static_cast<double>(last - first) + kPackingQueries);
        blocks.push_back({b, first, last - first, cost});
        total += cost;
      }
    }
    return total;
  }
};

const char* attention_isa() { return chosen_kernels().bfloat16.isa; }

AttentionPlan::AttentionPlan(const AttentionProblem& problem, int threads) {
  const Kernels& kernels = chosen_kernels();
  state_ = std::make_unique<State>(problem,
                                   problem.dtype == DType::kBFloat16 ? kernels.bfloat16 : kernels.others);
  State& s = *state_;
  const double cost = s.cut(s.choose_tiles(threads));
  const double work = cost * static_cast<double>(problem.heads * (problem.qk_dim + problem.v_dim));
  const int64_t items = static_cast<int64_t>(s.blocks.size()) * problem.heads;
  s.workers = static_cast<int>(
      std::min({static_cast<double>(threads), static_cast<double>(items), 1 + work / kWorthAThread}));
  // The costliest first: the small ones fill the gaps at the end.
  if (s.workers > 1) {
    std::stable_sort(s.blocks.begin(), s.blocks.end(),
                     [](const Block& a, const Block& b) { return a.cost > b.cost; });
  }
}

AttentionPlan::~AttentionPlan() = default;

int AttentionPlan::workers() const { return state_->workers; }

void AttentionPlan::work() {
  thread_local Scratch memory;
  State& s = *state_;
  float* scratch = memory.reserve(s.kernel.scratch_floats(s.problem));
  const int64_t items = static_cast<int64_t>(s.blocks.size()) * s.problem.heads;
  for (;;) {
    const int64_t i = s.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= items) return;
    const Block& block = s.blocks[static_cast<size_t>(i / s.problem.heads)];
    s.kernel.run(s.problem, {block.row, i % s.problem.heads, block.first, block.count}, scratch);
  }
}

}  // namespace mtserve::kernels
