// Sizes of a page and its parts, in bytes; the same for every tier.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mtserve {

struct Geometry {
  int32_t num_layers = 0;
  int32_t page_size = 0;    // tokens
  int32_t slot_tokens = 0;  // tokens of a host slot, a multiple of page_size
  int64_t k_row_bytes = 0;  // one token's keys in one layer
  int64_t v_row_bytes = 0;

  int64_t page_bytes() const { return page_size * (k_row_bytes + v_row_bytes); }
  int64_t slot_bytes() const { return num_layers * (slot_tokens / page_size) * page_bytes(); }
};

// Token rows [first, end) of one page. A page is its K block, then its V block.
struct PageRows {
  std::byte* page = nullptr;  // in the device table
  int32_t page_in_block = 0;
  int32_t first = 0;
  int32_t end = 0;
};

}  // namespace mtserve
