// A second tier, on a std::map, that insists on the Tier contract and can fail on the n-th call.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "tiers/page_copy.h"
#include "tiers/tier.h"

// What a test sees of the tier, and where it makes it fail. The engine owns the tier, the test owns this.
struct TierProbe {
  // The n-th call from now throws; 0 means none.
  std::atomic<int> fail_reserve{0}, fail_write{0}, fail_read{0};
  std::atomic<int64_t> blocks{0}, drops{0};
  std::atomic<int64_t> rows_written{0}, rows_read{0};  // token rows of one layer
};

class StrictTier : public mtserve::Tier {
 public:
  StrictTier(const mtserve::Geometry& geometry, int64_t slots, TierProbe& probe)
      : geometry_(geometry), slots_(slots), probe_(probe) {}

  ~StrictTier() override { CHECK_EQ(probe_.blocks.load(), static_cast<int64_t>(blocks_.size())); }

  int64_t capacity() const override { return slots_ * geometry_.slot_bytes(); }

  void reserve(mtserve::Block block) override {
    std::lock_guard lock(mutex_);
    strike(probe_.fail_reserve);
    // For the first time: nothing that is kept may overlap.
    CHECK(block.slot >= 0 && block.slot + (1 << block.order) <= slots_);
    auto next = blocks_.lower_bound(block.slot);
    CHECK(next == blocks_.end() || next->first >= block.slot + (1 << block.order));
    if (next != blocks_.begin()) {
      const auto& [slot, before] = *std::prev(next);
      CHECK(slot + (1 << before.order) <= block.slot);
    }
    Kept& kept = blocks_[block.slot];
    kept.order = block.order;
    kept.bytes.assign(geometry_.slot_bytes() << block.order, std::byte{0xDD});
    probe_.blocks = static_cast<int64_t>(blocks_.size());
  }

  void write(mtserve::Block block, int32_t layer, std::span<const mtserve::PageRows> rows) override {
    Use use(*this, block, layer, true);
    strike(probe_.fail_write);
    for (const mtserve::PageRows& r : rows) {
      mtserve::copy_rows(geometry_, use.page(layer, r.page_in_block), r.page, r.first, r.end);
      std::lock_guard lock(mutex_);
      for (int32_t row = r.first; row < r.end; ++row) use.kept->written.insert({layer, r.page_in_block, row});
      probe_.rows_written += r.end - r.first;
    }
  }

  void read(mtserve::Block block, int32_t layer, std::span<const mtserve::PageRows> rows) override {
    Use use(*this, block, layer, false);
    strike(probe_.fail_read);
    for (const mtserve::PageRows& r : rows) {
      {
        std::lock_guard lock(mutex_);
        for (int32_t row = r.first; row < r.end; ++row) CHECK(use.kept->written.count({layer, r.page_in_block, row}) == 1);
      }
      mtserve::copy_rows(geometry_, r.page, use.page(layer, r.page_in_block), r.first, r.end);
      probe_.rows_read += r.end - r.first;
    }
  }

  void drop(mtserve::Block block) override {
    std::lock_guard lock(mutex_);
    ++probe_.drops;
    const auto at = blocks_.find(block.slot);
    if (at == blocks_.end()) return;  // its reservation had failed
    CHECK_EQ(at->second.order, block.order);
    CHECK(at->second.users.empty());
    blocks_.erase(at);
    probe_.blocks = static_cast<int64_t>(blocks_.size());
  }

 private:
  struct Kept {
    int32_t order = 0;
    std::multimap<int32_t, bool> users;  // layer -> writes
    std::vector<std::byte> bytes;
    std::set<std::vector<int32_t>> written;  // layer, page, row
  };

  // Different layers may be used at once; within one, the index keeps a writer apart from everybody.
  struct Use {
    Use(StrictTier& tier, mtserve::Block block, int32_t layer, bool writes) : tier(tier) {
      std::lock_guard lock(tier.mutex_);
      const auto at = tier.blocks_.find(block.slot);
      if (at == tier.blocks_.end()) throw std::runtime_error("this block was never reserved");
      kept = &at->second;
      CHECK_EQ(kept->order, block.order);
      const auto [first, last] = kept->users.equal_range(layer);
      for (auto other = first; other != last; ++other) CHECK(!writes && !other->second);
      mine = kept->users.emplace(layer, writes);
    }
    ~Use() {
      std::lock_guard lock(tier.mutex_);
      kept->users.erase(mine);
    }
    std::byte* page(int32_t layer, int32_t page_in_block) const {
      const mtserve::Geometry& g = tier.geometry_;
      const int64_t pages = int64_t{g.slot_tokens / g.page_size} << kept->order;
      CHECK(page_in_block < pages);
      return kept->bytes.data() + (layer * pages + page_in_block) * g.page_bytes();
    }
    StrictTier& tier;
    Kept* kept;
    std::multimap<int32_t, bool>::iterator mine;
  };

  static void strike(std::atomic<int>& countdown) {
    if (countdown > 0 && --countdown == 0) throw std::runtime_error("this call fails");
  }

  const mtserve::Geometry geometry_;
  const int64_t slots_;
  TierProbe& probe_;
  std::mutex mutex_;
  std::map<mtserve::SlotId, Kept> blocks_;
};
