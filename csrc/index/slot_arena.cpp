#include "index/slot_arena.h"

#include <bit>

namespace mtserve {

SlotArena::SlotArena(int32_t num_chunks, int32_t slots_per_chunk)
    : max_order_(std::bit_width(static_cast<uint32_t>(slots_per_chunk)) - 1),
      num_free_(static_cast<int64_t>(num_chunks) << max_order_),
      state_(num_free_, kUsed),
      links_(num_free_),
      heads_(max_order_ + 1, -1),
      held_(num_chunks, 0) {
  for (int32_t chunk = num_chunks; chunk-- > 0;) push(chunk << max_order_, max_order_);
}

int64_t SlotArena::largest_free() const {
  for (int32_t order = max_order_; order >= 0; --order)
    if (heads_[order] >= 0) return int64_t{1} << order;
  return 0;
}

int32_t SlotArena::order_for(int32_t slots) const {
  return std::bit_width(static_cast<uint32_t>(slots > 1 ? slots - 1 : 0));
}

bool SlotArena::allocate(int32_t order, Block& block) {
  int32_t from = order;
  while (from <= max_order_ && heads_[from] < 0) ++from;
  if (from > max_order_) return false;
  const SlotId slot = heads_[from];
  unlink(slot, from);
  while (from > order) {
    --from;
    push(slot + (1 << from), from);
  }
  num_free_ -= int64_t{1} << order;
  block = Block{slot, order};
  return true;
}

void SlotArena::free(Block block) {
  num_free_ += int64_t{1} << block.order;
  SlotId slot = block.slot;
  int32_t order = block.order;
  while (order < max_order_) {
    const SlotId buddy = slot ^ (1 << order);
    if (state_[buddy] != order) break;
    unlink(buddy, order);
    slot &= ~(1 << order);
    ++order;
  }
  push(slot, order);
}

void SlotArena::hold(Block block) {
  if (held_[chunk_of(block)]++ == 0) ++chunks_held_;
}

void SlotArena::release(Block block) {
  if (--held_[chunk_of(block)] == 0) --chunks_held_;
}

void SlotArena::push(SlotId slot, int32_t order) {
  state_[slot] = static_cast<int8_t>(order);
  links_[slot] = Link{-1, heads_[order]};
  if (heads_[order] >= 0) links_[heads_[order]].prev = slot;
  heads_[order] = slot;
}

void SlotArena::unlink(SlotId slot, int32_t order) {
  const Link link = links_[slot];
  (link.prev < 0 ? heads_[order] : links_[link.prev].next) = link.next;
  if (link.next >= 0) links_[link.next].prev = link.prev;
  state_[slot] = kUsed;
}

size_t SlotArena::memory_bytes() const {
  return state_.capacity() + links_.capacity() * sizeof(Link) + heads_.capacity() * sizeof(SlotId) +
         held_.capacity() * sizeof(int32_t);
}

bool SlotArena::consistent() const {
  int64_t free = 0;
  for (int32_t order = 0; order <= max_order_; ++order)
    for (SlotId slot = heads_[order]; slot >= 0; slot = links_[slot].next) {
      if (state_[slot] != order || slot & ((1 << order) - 1)) return false;
      free += int64_t{1} << order;
    }
  return free == num_free_;
}

}  // namespace mtserve
