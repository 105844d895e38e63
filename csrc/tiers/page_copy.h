// Copies token rows [first, end) between two pages: only these rows, so that a neighbour's append is never overwritten.
#pragma once

#include "tiers/geometry.h"
#include "runtime/stream_copy.h"

namespace mtserve {

inline void copy_rows(const Geometry& g, std::byte* to, const std::byte* from, int32_t first, int32_t end) {
  if (first == 0 && end == g.page_size) {
    copy_past_caches(to, from, static_cast<size_t>(g.page_bytes()));
    return;
  }
  const int64_t k = first * g.k_row_bytes;
  copy_past_caches(to + k, from + k, static_cast<size_t>((end - first) * g.k_row_bytes));
  const int64_t v = g.page_size * g.k_row_bytes + first * g.v_row_bytes;
  copy_past_caches(to + v, from + v, static_cast<size_t>((end - first) * g.v_row_bytes));
}

}  // namespace mtserve
