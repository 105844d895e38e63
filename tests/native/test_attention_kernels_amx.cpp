// Attention by AMX against its definition in float64, and its promises about bits. Where the processor has no tiles,
// their instructions are trapped and emulated.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <random>
#include <vector>

#include "check.h"

#if !defined(MTSERVE_X86_AMX)
int main() {
  std::puts("skipped, for another processor: 0 tests passed");
}
#else

#include "kernels/amx_support.h"
#include "kernels/amx_trap.h"
#include "kernels/attention_kernel.h"
#include "kernels/kernel_check.h"

using namespace mtserve::kernels;

namespace {

using Numbers = std::vector<uint16_t>;

std::mt19937_64 generator(20);

constexpr uint16_t kNaN = 0x7fc1;
constexpr int64_t kDims[] = {1, 16, 24, 64, 80, 128, 256};

int64_t pick(int64_t least, int64_t most) { return least + static_cast<int64_t>(generator() % (most - least + 1)); }

float widen(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

Numbers normal(int64_t count) {
  std::normal_distribution<float> draw;
  Numbers out(static_cast<size_t>(count));
  for (uint16_t& x : out) x = static_cast<uint16_t>((std::bit_cast<uint32_t>(draw(generator)) + 0x8000u) >> 16);
  return out;
}

// A batch row's tokens, history and then candidates: [tokens, heads, dim].
struct Row {
  int64_t history, candidates;
  Numbers q, k, v;
  int64_t tokens() const { return history + candidates; }
};

struct Batch {
  int64_t heads = 1, qk_dim = 16, v_dim = 16, page_size = 8, window = 0;
  float scale = 1, norm_len = 50;
  std::vector<Row> rows;

  void add_row(int64_t history, int64_t candidates) {
    const int64_t n = (history + candidates) * heads;
    rows.push_back({history, candidates, normal(n * qk_dim), normal(n * qk_dim), normal(n * v_dim)});
  }
};

Batch random_batch() {
  Batch batch;
  batch.heads = pick(1, 2);
  batch.qk_dim = kDims[pick(0, 6)];
  batch.v_dim = kDims[pick(0, 6)];
  batch.page_size = pick(0, 1) ? pick(1, 9) : 32;
  batch.window = pick(0, 2) == 0 ? 0 : pick(1, 200);
  batch.scale = 2.0f / std::sqrt(static_cast<float>(batch.qk_dim));
  const int64_t border = kKeyBlock * pick(0, 2);
  batch.add_row(std::max<int64_t>(0, border + pick(-2, 2)), pick(0, 3));
  batch.add_row(pick(0, 300), pick(0, 40));
  return batch;
}

// What is left of a sum is far smaller than what is added: keys come in pairs, some keys apart, that differ in one bit
// of one number and have opposite values.
void let_values_cancel(Batch& batch) {
  for (Row& row : batch.rows) {
    const int64_t apart = pick(1, 40);
    for (int64_t j = 0; j + apart < row.history; ++j) {
      if (j / apart % 2 == 1) continue;
      for (int64_t head = 0; head < batch.heads; ++head) {
        const int64_t at = j * batch.heads + head, twin = at + apart * batch.heads;
        std::copy_n(&row.k[at * batch.qk_dim], batch.qk_dim, &row.k[twin * batch.qk_dim]);
        row.k[twin * batch.qk_dim + pick(0, batch.qk_dim - 1)] ^= 1;
        for (int64_t d = 0; d < batch.v_dim; ++d) row.v[twin * batch.v_dim + d] = row.v[at * batch.v_dim + d] ^ 0x8000;
      }
    }
  }
}

// The batch as the kernel takes it, so much of each history in pages, and NaN wherever nothing may be read.
struct Laid {
  AttentionProblem problem{};
  std::vector<int64_t> offsets{0}, candidates, paged;
  std::vector<int32_t> pages, indptr{0};
  Numbers q, k, v, table, out;

  Laid(const Batch& batch, const std::vector<int64_t>& in_pages) : paged(in_pages) {
    const int64_t heads = batch.heads, rows = static_cast<int64_t>(batch.rows.size()), size = batch.page_size;
    for (int64_t b = 0; b < rows; ++b) {
      offsets.push_back(offsets.back() + batch.rows[b].tokens() - paged[b]);
      candidates.push_back(batch.rows[b].candidates);
      indptr.push_back(indptr.back() + static_cast<int32_t>((paged[b] + size - 1) / size));
    }
    const int64_t total = indptr.back() + 2, page = size * heads * (batch.qk_dim + batch.v_dim);
    for (int64_t i = 0; i < total; ++i) pages.push_back(static_cast<int32_t>(i));
    std::shuffle(pages.begin(), pages.end(), generator);
    problem.page_stride = page + pick(0, 5);
    table.assign(static_cast<size_t>((total - 1) * problem.page_stride + page), kNaN);
    lay(batch, q, problem.q_stride, batch.qk_dim, &Row::q, -1);
    lay(batch, k, problem.k_stride, batch.qk_dim, &Row::k, 0);
    lay(batch, v, problem.v_stride, batch.v_dim, &Row::v, size * heads * batch.qk_dim);
    out.assign(static_cast<size_t>(offsets.back() * heads * batch.v_dim), kNaN);
    problem.dtype = DType::kBFloat16;
    problem.q = q.data();
    problem.k = k.data();
    problem.v = v.data();
    problem.table = table.data();
    problem.out = out.data();
    problem.offsets = offsets.data();
    problem.num_candidates = candidates.data();
    problem.paged_lens = paged.data();
    problem.page_indices = pages.data();
    problem.page_indptr = indptr.data();
    problem.rows = rows;
    problem.heads = heads;
    problem.qk_dim = batch.qk_dim;
    problem.v_dim = batch.v_dim;
    problem.page_size = size;
    problem.scale = batch.scale;
    problem.norm_len = batch.norm_len;
    problem.max_attn_len = batch.window;
  }
  Laid(const Laid&) = delete;

  // Heads and tokens lie apart; the last token ends where the memory does. `in_page`: below 0 if not in pages.
  void lay(const Batch& batch, Numbers& to, int64_t* stride, int64_t dim, Numbers Row::*from, int64_t in_page) {
    stride[1] = dim + pick(0, 1) * pick(1, 3);
    stride[0] = batch.heads * stride[1] + pick(0, 1) * pick(1, 40);
    if (offsets.back() > 0)
      to.assign(static_cast<size_t>((offsets.back() - 1) * stride[0] + (batch.heads - 1) * stride[1] + dim), kNaN);
    for (size_t b = 0; b < batch.rows.size(); ++b) {
      const Numbers& numbers = batch.rows[b].*from;
      for (int64_t i = 0; i < batch.rows[b].tokens(); ++i) {
        for (int64_t head = 0; head < batch.heads; ++head) {
          const uint16_t* source = numbers.data() + (i * batch.heads + head) * dim;
          if (i >= paged[b]) {
            std::copy_n(source, dim, &to[(offsets[b] + i - paged[b]) * stride[0] + head * stride[1]]);
          } else if (in_page >= 0) {
            const int64_t id = pages[indptr[b] + i / batch.page_size], row = i % batch.page_size;
            std::copy_n(source, dim, &table[id * problem.page_stride + in_page + (row * batch.heads + head) * dim]);
          }
        }
      }
    }
  }

  // In items of random sizes, with working memory in which NaN lies.
  void attend(const AttentionKernel& kernel) {
    constexpr std::align_val_t kAlign{64};
    const auto bytes = static_cast<size_t>(kernel.scratch_floats(problem)) * sizeof(float);
    auto* scratch = static_cast<float*>(::operator new(bytes, kAlign));
    std::memset(scratch, 0xff, bytes);
    const int64_t limit = pick(0, 1) ? kMaxTiles * kernel.tile_rows : pick(1, 40);
    for (int64_t b = 0; b < problem.rows; ++b) {
      for (int64_t first = 0; first < offsets[b + 1] - offsets[b];) {
        const int64_t count = std::min(pick(1, limit), offsets[b + 1] - offsets[b] - first);
        for (int64_t head = 0; head < problem.heads; ++head) kernel.run(problem, {b, head, first, count}, scratch);
        first += count;
      }
    }
    ::operator delete(scratch, kAlign);
  }

  // Of one token, all heads.
  Numbers result(int64_t row, int64_t token) const {
    const int64_t width = problem.heads * problem.v_dim;
    const auto at = out.begin() + (offsets[row] + token - paged[row]) * width;
    return Numbers(at, at + width);
  }
};

double silu(double x) { return x / (1 + std::exp(-x)); }

// Every number is the exact one rounded once, but for the error of float32: 1e-6 of what was added up.
void check_against_definition(const Batch& batch, const Laid& laid) {
  std::vector<double> sums(batch.v_dim), errors(batch.v_dim);
  for (size_t b = 0; b < batch.rows.size(); ++b) {
    const Row& row = batch.rows[b];
    for (int64_t i = laid.paged[b]; i < row.tokens(); ++i) {
      const Numbers out = laid.result(static_cast<int64_t>(b), i);
      for (int64_t head = 0; head < batch.heads; ++head) {
        std::fill(sums.begin(), sums.end(), 0);
        std::fill(errors.begin(), errors.end(), 0);
        for (int64_t j = 0; j <= i; ++j) {
          const int64_t position = std::min(i, row.history);
          const bool seen = j < row.history && (batch.window == 0 || position - j <= batch.window);
          if (!seen && i != j) continue;
          double dot = 0, terms = 0;
          for (int64_t d = 0; d < batch.qk_dim; ++d) {
            const double term = static_cast<double>(widen(row.q[(i * batch.heads + head) * batch.qk_dim + d])) *
                                widen(row.k[(j * batch.heads + head) * batch.qk_dim + d]);
            dot += term;
            terms += std::fabs(term);
          }
          const double score = silu(batch.scale * dot) / batch.norm_len;
          const double score_error = 1e-6 * (std::fabs(score) + batch.scale * terms / batch.norm_len / 4);
          for (int64_t d = 0; d < batch.v_dim; ++d) {
            const double value = widen(row.v[(j * batch.heads + head) * batch.v_dim + d]);
            sums[d] += score * value;
            errors[d] += score_error * std::fabs(value);
          }
        }
        for (int64_t d = 0; d < batch.v_dim; ++d) {
          const double half_unit = sums[d] == 0 ? 0 : std::exp2(std::floor(std::log2(std::fabs(sums[d]))) - 8);
          CHECK(std::fabs(widen(out[head * batch.v_dim + d]) - sums[d]) <= half_unit + errors[d]);
        }
      }
    }
  }
}

std::vector<int64_t> split(const Batch& batch) {
  std::vector<int64_t> paged;
  for (const Row& row : batch.rows) paged.push_back(pick(0, 3) == 0 ? row.history * pick(0, 1) : pick(0, row.history));
  return paged;
}

void matches_the_definition() {
  for (int round = 0; round < (quick ? 12 : 300); ++round) {
    Batch batch = random_batch();
    if (pick(0, 1)) let_values_cancel(batch);
    Laid laid(batch, split(batch));
    laid.attend(kAttentionAmx);
    check_against_definition(batch, laid);
  }
}

// Whatever lies in pages, in whichever item and batch a token is.
void bits_depend_on_the_row_alone() {
  for (int round = 0; round < (quick ? 6 : 200); ++round) {
    Batch batch = random_batch();
    // The order of sums shows.
    let_values_cancel(batch);
    Laid whole(batch, {0, 0});
    whole.attend(kAttentionAmx);
    for (int again = 0; again < 3; ++again) {
      Laid other(batch, split(batch));
      other.attend(kAttentionAmx);
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t i = other.paged[b]; i < batch.rows[b].tokens(); ++i)
          CHECK(other.result(b, i) == whole.result(b, i));
      }
    }
    Batch alone = batch;
    alone.rows.erase(alone.rows.begin());
    Laid last(alone, {alone.rows[0].history});
    last.attend(kAttentionAmx);
    for (int64_t i = alone.rows[0].history; i < alone.rows[0].tokens(); ++i)
      CHECK(last.result(0, i) == whole.result(1, i));
  }
}

// It must not get lost in parts of scores or in what is masked.
void what_is_not_finite_shows() {
  for (int round = 0; round < (quick ? 4 : 50); ++round) {
    Batch batch = random_batch();
    batch.window = 0;
    batch.rows.resize(1);
    Row& row = batch.rows[0];
    if (row.history == 0) continue;
    const int64_t token = pick(0, row.history - 1), head = pick(0, batch.heads - 1);
    const bool in_key = pick(0, 1);
    const int64_t dim = in_key ? batch.qk_dim : batch.v_dim, place = pick(0, dim - 1);
    const uint16_t infinity = 0x7f80, sign = static_cast<uint16_t>(pick(0, 1) << 15);
    (in_key ? row.k : row.v)[(token * batch.heads + head) * dim + place] = pick(0, 1) ? kNaN : infinity | sign;
    Laid laid(batch, {pick(0, token)});
    laid.attend(kAttentionAmx);
    for (int64_t i = token; i < row.tokens(); ++i) {
      const Numbers out = laid.result(0, i);
      for (int64_t d = 0; d < batch.v_dim; ++d)
        CHECK(!(in_key || d == place) || !std::isfinite(widen(out[head * batch.v_dim + d])));
    }
  }
}

void run_wrongly(const AttentionProblem& problem, const AttentionItem& item, float* scratch) {
  kAttentionAmx.run(problem, item, scratch);
  // One number of one query off by two units of its last place.
  if (item.head == 1) static_cast<uint16_t*>(problem.out)[(item.first * problem.heads + 1) * problem.v_dim + 7] += 2;
}

void a_wrong_kernel_is_noticed() {
  CHECK(kernels_agree(kAttentionAmx, kAttentionBaseline));
  AttentionKernel wrong = kAttentionAmx;
  wrong.run = run_wrongly;
  CHECK(!kernels_agree(wrong, kAttentionBaseline));
  wrong.run = [](const AttentionProblem&, const AttentionItem&, float*) {};
  CHECK(!kernels_agree(wrong, kAttentionBaseline));
}

}  // namespace

int main(int argc, char** argv) {
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    std::puts("skipped, the processor lacks AVX-512: 0 tests passed");
    return 0;
  }
  const bool amx = request_amx();
  if (!amx) trap_amx();
  const int failed = run_tests(argc, argv,
                               {{"matches the definition", matches_the_definition},
                                {"bits depend on the row alone", bits_depend_on_the_row_alone},
                                {"what is not finite shows", what_is_not_finite_shows},
                                {"a wrong kernel is noticed", a_wrong_kernel_is_noticed}});
  CHECK((trapped() == 0) == amx);
  return failed;
}
#endif
