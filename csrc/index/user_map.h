// Hash map (user, version) -> entry: open addressing, linear probing, backward-shift deletion. No tombstones, so a
// stream of ids that come and go leaves no trace.
#pragma once

#include <cstdint>
#include <cstddef>
#include <vector>

#include "index/types.h"

namespace mtserve {

class UserMap {
 public:
  UserMap() : cells_(kMinCells) {}

  EntryId find(int64_t user, uint32_t version) const {
    for (size_t i = home(user, version);; i = (i + 1) & mask()) {
      const Cell& cell = cells_[i];
      if (cell.entry == kNoEntry) return kNoEntry;
      if (cell.user == user && cell.version == version) return cell.entry;
    }
  }

  // The key must be absent.
  void insert(int64_t user, uint32_t version, EntryId entry) {
    if ((size_ + 1) * 4 > cells_.size() * 3) rehash(cells_.size() * 2);
    place(Cell{user, version, entry});
    ++size_;
  }

  // The key must be present.
  void erase(int64_t user, uint32_t version) {
    size_t hole = home(user, version);
    while (cells_[hole].user != user || cells_[hole].version != version || cells_[hole].entry == kNoEntry)
      hole = (hole + 1) & mask();
    for (size_t i = (hole + 1) & mask(); cells_[i].entry != kNoEntry; i = (i + 1) & mask()) {
      const size_t wanted = home(cells_[i].user, cells_[i].version);
      if (((i - wanted) & mask()) >= ((i - hole) & mask())) {
        cells_[hole] = cells_[i];
        hole = i;
      }
    }
    cells_[hole] = Cell{};
    --size_;
    if (cells_.size() > kMinCells && size_ * 8 < cells_.size()) rehash(cells_.size() / 2);
  }

  size_t size() const { return size_; }
  size_t memory_bytes() const { return cells_.capacity() * sizeof(Cell); }

  template <class Visit>
  void for_each(Visit visit) const {
    for (const Cell& cell : cells_)
      if (cell.entry != kNoEntry) visit(cell.entry);
  }

 private:
  struct Cell {
    int64_t user = 0;
    uint32_t version = 0;
    EntryId entry = kNoEntry;
  };
  static constexpr size_t kMinCells = 64;

  size_t mask() const { return cells_.size() - 1; }

  size_t home(int64_t user, uint32_t version) const {
    uint64_t x = static_cast<uint64_t>(user) + 0x9e3779b97f4a7c15ull * (version + 1);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return (x ^ (x >> 31)) & mask();
  }

  void place(const Cell& cell) {
    size_t i = home(cell.user, cell.version);
    while (cells_[i].entry != kNoEntry) i = (i + 1) & mask();
    cells_[i] = cell;
  }

  void rehash(size_t cells) {
    std::vector<Cell> old(cells);
    old.swap(cells_);
    for (const Cell& cell : old)
      if (cell.entry != kNoEntry) place(cell);
  }

  std::vector<Cell> cells_;
  size_t size_ = 0;
};

}  // namespace mtserve
