// Buddy allocator over the slots of the host arena: who owns which slot, not the bytes.
//
// Slots come in chunks of 2^max_order adjacent slots. A full chunk takes the largest order, a tail the smallest that
// fits, and freed buddies merge again.
#pragma once

#include <cstdint>
#include <cstddef>
#include <vector>

#include "index/types.h"

namespace mtserve {

class SlotArena {
 public:
  SlotArena(int32_t num_chunks, int32_t slots_per_chunk);

  int32_t max_order() const { return max_order_; }
  int64_t total() const { return static_cast<int64_t>(state_.size()); }
  int64_t num_free() const { return num_free_; }
  int64_t largest_free() const;  // slots in the largest free block

  // The smallest order whose block holds `slots`.
  int32_t order_for(int32_t slots) const;

  // Returns false when no block of this order is free.
  bool allocate(int32_t order, Block& block);
  void free(Block block);

  // A block that a transfer or a batch uses cannot be evicted; a chunk without such blocks can be emptied whole.
  void hold(Block block);
  void release(Block block);
  bool can_empty_a_chunk() const { return chunks_held_ < static_cast<int64_t>(held_.size()); }

  size_t memory_bytes() const;
  bool consistent() const;

 private:
  // State of a slot: its order when it heads a free block, kUsed otherwise.
  static constexpr int8_t kUsed = -1;
  struct Link {
    SlotId prev = -1;
    SlotId next = -1;
  };

  void push(SlotId slot, int32_t order);
  void unlink(SlotId slot, int32_t order);
  size_t chunk_of(Block block) const { return static_cast<size_t>(block.slot) >> max_order_; }

  int32_t max_order_ = 0;
  int64_t num_free_ = 0;
  int64_t chunks_held_ = 0;
  std::vector<int8_t> state_;
  std::vector<Link> links_;
  std::vector<SlotId> heads_;   // per order
  std::vector<int32_t> held_;   // per chunk
};

}  // namespace mtserve
