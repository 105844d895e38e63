// The buddy allocator against a bitmap: aligned, no overlap, merged again, and never short when a block is free.
#include <algorithm>
#include <random>

#include "check.h"
#include "index/slot_arena.h"

using namespace mtserve;

namespace {

// The largest order for which an aligned run of free slots exists; -1 when none does.
int largest_order(const std::vector<bool>& used, int max_order) {
  for (int order = max_order; order >= 0; --order)
    for (size_t slot = 0; slot < used.size(); slot += size_t{1} << order)
      if (std::none_of(used.begin() + slot, used.begin() + slot + (1 << order), [](bool u) { return u; })) return order;
  return -1;
}

void random_blocks() {
  std::mt19937 random(7);
  for (int round = 0; round < (quick ? 20 : 200); ++round) {
    const int max_order = round % 5, chunks = 1 + round % 7;
    SlotArena arena(chunks, 1 << max_order);
    CHECK_EQ(arena.max_order(), max_order);
    CHECK_EQ(arena.total(), int64_t{chunks} << max_order);
    std::vector<bool> used(arena.total(), false);
    std::vector<Block> blocks;
    for (int step = 0; step < 300; ++step) {
      if (blocks.empty() || random() % 5 < 3) {
        const int order = static_cast<int>(random() % (max_order + 1));
        Block block;
        const bool granted = arena.allocate(order, block);
        CHECK_EQ(granted, largest_order(used, max_order) >= order);
        if (!granted) continue;
        CHECK_EQ(block.order, order);
        CHECK_EQ(block.slot % (1 << order), 0);
        for (int i = 0; i < 1 << order; ++i) {
          CHECK(!used[block.slot + i]);
          used[block.slot + i] = true;
        }
        blocks.push_back(block);
      } else {
        std::swap(blocks[random() % blocks.size()], blocks.back());
        for (int i = 0; i < 1 << blocks.back().order; ++i) used[blocks.back().slot + i] = false;
        arena.free(blocks.back());
        blocks.pop_back();
      }
      CHECK(arena.consistent());
      CHECK_EQ(arena.num_free(), static_cast<int64_t>(std::count(used.begin(), used.end(), false)));
      const int largest = largest_order(used, max_order);
      CHECK_EQ(arena.largest_free(), largest < 0 ? int64_t{0} : int64_t{1} << largest);
    }
    std::shuffle(blocks.begin(), blocks.end(), random);
    for (const Block& block : blocks) arena.free(block);
    // All merged: every chunk can be had whole.
    for (int i = 0; i < chunks; ++i) {
      Block block;
      CHECK(arena.allocate(max_order, block));
    }
    Block block;
    CHECK(!arena.allocate(0, block));
    CHECK_EQ(arena.largest_free(), int64_t{0});
  }
}

void orders() {
  SlotArena arena(1, 8);
  const int wanted[] = {0, 0, 1, 2, 2, 3, 3, 3, 3};
  for (int slots = 0; slots <= 8; ++slots) CHECK_EQ(arena.order_for(slots), wanted[slots]);
}

void held_chunks() {
  SlotArena arena(2, 4);
  Block a, b, c;
  CHECK(arena.allocate(1, a) && arena.allocate(1, b) && arena.allocate(2, c));
  CHECK_EQ(a.slot / 4, b.slot / 4);
  CHECK(arena.can_empty_a_chunk());
  arena.hold(a);
  arena.hold(b);
  CHECK(arena.can_empty_a_chunk());
  arena.hold(c);
  CHECK(!arena.can_empty_a_chunk());
  arena.release(a);
  CHECK(!arena.can_empty_a_chunk());
  arena.release(b);
  CHECK(arena.can_empty_a_chunk());
}

void no_host_tier() {
  SlotArena arena(0, 8);
  Block block;
  CHECK(!arena.allocate(0, block));
  CHECK(!arena.can_empty_a_chunk());
  CHECK_EQ(arena.largest_free(), int64_t{0});
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"random blocks against a bitmap", random_blocks},
                    {"order for a number of slots", orders},
                    {"chunks in use cannot be emptied", held_chunks},
                    {"no host tier", no_host_tier}});
}
