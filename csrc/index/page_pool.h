// Free device pages, each with the moment after which it may be written again.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "index/id_list.h"
#include "index/types.h"

namespace mtserve {

class PagePool {
 public:
  explicit PagePool(int32_t num_pages) : free_(num_pages), fence_(num_pages, 0) {
    // Taken from the back: low page ids go first.
    std::iota(free_.rbegin(), free_.rend(), 0);
  }

  int32_t total() const { return static_cast<int32_t>(fence_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }

  // Appends `n` pages; returns the latest fence among them. There must be enough.
  Fence take(int32_t n, IdList<PageId>& pages) {
    Fence after = 0;
    for (int32_t i = 0; i < n; ++i) {
      const PageId page = free_.back();
      free_.pop_back();
      after = std::max(after, fence_[page]);
      pages.push_back(page);
    }
    return after;
  }

  // Frees the pages behind the first `keep`; they carry `last_use`.
  void give_back(IdList<PageId>& pages, int32_t keep, Fence last_use) {
    while (pages.size() > keep) {
      fence_[pages.back()] = last_use;
      free_.push_back(pages.back());
      pages.pop_back();
    }
  }

  const std::vector<PageId>& free_pages() const { return free_; }
  size_t memory_bytes() const { return free_.capacity() * sizeof(PageId) + fence_.capacity() * sizeof(Fence); }

 private:
  std::vector<PageId> free_;
  std::vector<Fence> fence_;
};

}  // namespace mtserve
