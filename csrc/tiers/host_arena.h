// Host memory as one arena, complete before serving starts (paper 4.1: the CPU tier).
//
// A block of 2^order slots lies at slot * slot_bytes, laid out [layer][page][K block | V block], so that one layer of a
// chunk is one contiguous piece (2 MiB at the paper's size).
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "tiers/tier.h"

namespace mtserve {

// Makes memory reachable for copy engines, and takes that back. `pin` may throw.
struct Pinner {
  std::function<void(std::byte*, int64_t)> pin;
  std::function<void(std::byte*)> unpin;
};

class HostArena : public Tier {
 public:
  // Maps the address range; throws std::bad_alloc when the system refuses. Huge pages where it allows them.
  HostArena(const Geometry& geometry, int64_t num_slots, Pinner pinner = {});
  ~HostArena() override;
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // Makes the next `bytes` of the arena resident, on `threads` threads, and pins them; returns the bytes resident so far.
  // Without it the first requests would pay for the page faults, and copy engines would not reach them.
  int64_t touch(int64_t bytes, int threads);

  int64_t capacity() const override { return base_ == nullptr ? 0 : bytes_; }
  void reserve(Block) override {}
  void write(Block block, int32_t layer, std::span<const PageRows> rows) override;
  void read(Block block, int32_t layer, std::span<const PageRows> rows) override;
  std::byte* address(Block block, int32_t layer, int32_t page_in_block) const override {
    return page_at(block, layer, page_in_block);
  }
  void drop(Block) override {}
  void close() override;

 private:
  std::byte* page_at(Block block, int32_t layer, int32_t page_in_block) const;

  const Geometry geometry_;
  const int64_t bytes_;
  const Pinner pinner_;
  std::vector<std::byte*> pinned_;
  int64_t touched_ = 0;
  std::byte* base_ = nullptr;
};

}  // namespace mtserve
