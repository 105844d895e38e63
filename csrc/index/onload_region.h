// The onload region (paper 4.1): the pages behind those of the users, where onloads land.
//
// A *span* is a run of adjacent pages that one onload fills. The onload holds it until its copies are observed to be
// done, and so does a batch that reads it; with the last holder it becomes free, and carries the moment after which it
// may be written. Spans are taken round the region, so that what was freed last is overwritten last.
#pragma once

#include <algorithm>
#include <vector>

#include "index/types.h"

namespace mtserve {

class OnloadRegion {
 public:
  OnloadRegion(PageId first, int32_t pages) : first_(first), fence_(pages, 0) {}

  int32_t total() const { return static_cast<int32_t>(fence_.size()); }
  int32_t num_free() const {
    int32_t taken = 0;
    for (const Span& span : spans_) taken += span.pages;
    return total() - taken;
  }

  // A span of `pages` pages for a load: its first page id, or -1 when there is no room. `after` is raised to the moment
  // after which all of it may be written.
  PageId take(Ticket load, int32_t pages, Fence& after) {
    int32_t at = fits(next_, pages) ? next_ : fits(0, pages) ? 0 : -1;
    for (size_t i = 0; at < 0 && i < spans_.size(); ++i) {
      const int32_t behind = spans_[i].at + spans_[i].pages;
      if (fits(behind, pages)) at = behind;
    }
    if (at < 0) return -1;
    spans_.push_back({load, at, pages, 1, 0});
    next_ = at + pages;
    for (int32_t i = at; i < at + pages; ++i) after = std::max(after, fence_[i]);
    return first_ + at;
  }

  void hold(Ticket load) { ++find(load)->holders; }

  // One holder less; nothing happens for a load without a span.
  void release(Ticket load, Fence last_use) {
    const auto span = find(load);
    if (span == spans_.end()) return;
    span->last_use = std::max(span->last_use, last_use);
    if (--span->holders > 0) return;
    std::fill_n(fence_.begin() + span->at, span->pages, span->last_use);
    spans_.erase(span);
  }

  size_t memory_bytes() const { return fence_.capacity() * sizeof(Fence) + spans_.capacity() * sizeof(Span); }

 private:
  struct Span {
    Ticket load;
    int32_t at, pages, holders;
    Fence last_use;
  };

  // Few: one per onload in flight or being read.
  std::vector<Span>::iterator find(Ticket load) {
    return std::find_if(spans_.begin(), spans_.end(), [&](const Span& span) { return span.load == load; });
  }

  bool fits(int32_t at, int32_t pages) const {
    return pages <= total() - at && std::none_of(spans_.begin(), spans_.end(), [&](const Span& span) {
             return span.at < at + pages && at < span.at + span.pages;
           });
  }

  const PageId first_;
  std::vector<Fence> fence_;  // per page
  std::vector<Span> spans_;
  int32_t next_ = 0;
};

}  // namespace mtserve
