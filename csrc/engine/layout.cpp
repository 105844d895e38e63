#include "engine/layout.h"

#include <algorithm>

namespace mtserve {

void write_layout(const Batch& batch, const std::vector<int64_t>& candidates, int64_t* out) {
  const size_t rows = batch.rows.size();
  const size_t stride = rows + 1;
  int64_t offset = 0;
  for (size_t i = 0; i < rows; ++i) {
    const BatchRow& row = batch.rows[i];
    const int64_t context = row.cached > 0 ? 0 : batch.context_tokens;
    const int64_t cached = row.cached > 0 ? row.cached - batch.context_tokens : 0;
    const int64_t delta = row.tokens - batch.context_tokens - cached;
    out[i] = cached;
    out[stride + i] = context;
    out[2 * stride + i] = delta;
    out[3 * stride + i] = row.cached;
    out[4 * stride + i] = candidates[i];
    out[5 * stride + i] = offset;
    offset += context + delta + candidates[i];
  }
  for (size_t r = 0; r < 5; ++r) out[r * stride + rows] = 0;
  out[5 * stride + rows] = offset;
}

namespace {

int64_t covered(const BatchRow& row, bool include_delta) { return include_delta ? row.tokens : row.cached; }
int64_t pages_for(int64_t tokens, int32_t page_size) { return (tokens + page_size - 1) / page_size; }

}  // namespace

int64_t table_size(const Batch& batch, int32_t page_size, bool include_delta) {
  int64_t size = 0;
  for (const BatchRow& row : batch.rows) {
    const int64_t pages = pages_for(covered(row, include_delta), page_size);
    if (pages > row.num_pages || (include_delta && !row.stores && row.tokens > row.cached)) return -1;
    size += pages;
  }
  return size;
}

void write_table(const Batch& batch, int32_t page_size, bool include_delta, int32_t* out) {
  const size_t rows = batch.rows.size();
  int32_t* lens = out + rows + 1;
  int32_t* ids = lens + rows;
  int32_t at = 0;
  out[0] = 0;
  for (size_t i = 0; i < rows; ++i) {
    const BatchRow& row = batch.rows[i];
    const int64_t tokens = covered(row, include_delta);
    const int32_t pages = static_cast<int32_t>(pages_for(tokens, page_size));
    const bool own = include_delta && row.stores;  // the delta is in no other
    for (int32_t p = 0; p < pages; ++p) ids[at++] = own ? batch.pages[row.first_page + p] : batch.cached_page(row, p);
    out[i + 1] = at;
    lens[i] = tokens == 0 ? 0 : static_cast<int32_t>(tokens - int64_t{pages - 1} * page_size);
  }
}

void write_slots(const Batch& batch, const std::vector<int64_t>& candidates, int32_t page_size, int64_t* out) {
  for (size_t i = 0; i < batch.rows.size(); ++i) {
    const BatchRow& row = batch.rows[i];
    for (int32_t t = row.cached; t < row.tokens; ++t)
      *out++ = row.stores ? int64_t{batch.pages[row.first_page + t / page_size]} * page_size + t % page_size : -1;
    out = std::fill_n(out, candidates[i], -1);
  }
}

}  // namespace mtserve
