// The device tier's pages: one tensor [layers, pages, page_elements] that torch owns; here only its address.
#pragma once

#include "index/types.h"
#include "tiers/geometry.h"

namespace mtserve {

struct DeviceTable {
  std::byte* base = nullptr;
  int64_t num_pages = 0;
  int64_t page_bytes = 0;

  std::byte* page(int32_t layer, PageId id) const { return base + (layer * num_pages + id) * page_bytes; }
};

}  // namespace mtserve
