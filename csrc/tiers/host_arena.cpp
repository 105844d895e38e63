#include "tiers/host_arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <thread>
#include <vector>

#include "tiers/page_copy.h"

namespace mtserve {

namespace {

// Writes to every page of the range, so that the system backs it now.
void populate(std::byte* begin, int64_t bytes) {
  if (bytes <= 0) return;
#ifdef MADV_POPULATE_WRITE
  if (madvise(begin, static_cast<size_t>(bytes), MADV_POPULATE_WRITE) == 0) return;
#endif
  constexpr int64_t kPage = 4096;
  for (int64_t at = 0; at < bytes; at += kPage) *reinterpret_cast<volatile std::byte*>(begin + at) = std::byte{0};
}

}  // namespace

HostArena::HostArena(const Geometry& geometry, int64_t num_slots, Pinner pinner)
    : geometry_(geometry), bytes_(num_slots * geometry.slot_bytes()), pinner_(std::move(pinner)) {
  if (bytes_ == 0) return;
  void* at = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<std::byte*>(at);
#ifdef MADV_HUGEPAGE
  madvise(at, static_cast<size_t>(bytes_), MADV_HUGEPAGE);  // a wish, not a need
#endif
}

HostArena::~HostArena() { HostArena::close(); }

void HostArena::close() {
  for (std::byte* slice : pinned_) pinner_.unpin(slice);
  pinned_.clear();
  if (base_ != nullptr) munmap(base_, static_cast<size_t>(bytes_));
  base_ = nullptr;
}

int64_t HostArena::touch(int64_t bytes, int threads) {
  constexpr int64_t kAlign = int64_t{2} << 20;
  // No copy may cross from one pinned slice to the next, and no page of the system may belong to two.
  const int64_t whole = std::lcm(kAlign, geometry_.slot_bytes());
  const int64_t end = std::min(bytes_, (touched_ + bytes + whole - 1) / whole * whole);
  const int64_t share = ((end - touched_) / threads + kAlign) / kAlign * kAlign;
  std::vector<std::thread> workers;
  for (int64_t at = touched_; at < end; at += share)
    workers.emplace_back(populate, base_ + at, std::min(share, end - at));
  for (std::thread& worker : workers) worker.join();
  if (pinner_.pin && end > touched_) {
    pinner_.pin(base_ + touched_, end - touched_);
    pinned_.push_back(base_ + touched_);
  }
  return touched_ = end;
}

std::byte* HostArena::page_at(Block block, int32_t layer, int32_t page_in_block) const {
  const int64_t pages_per_block = int64_t{geometry_.slot_tokens / geometry_.page_size} << block.order;
  return base_ + block.slot * geometry_.slot_bytes() + (layer * pages_per_block + page_in_block) * geometry_.page_bytes();
}

void HostArena::write(Block block, int32_t layer, std::span<const PageRows> rows) {
  for (const PageRows& r : rows) copy_rows(geometry_, page_at(block, layer, r.page_in_block), r.page, r.first, r.end);
}

void HostArena::read(Block block, int32_t layer, std::span<const PageRows> rows) {
  for (const PageRows& r : rows) copy_rows(geometry_, r.page, page_at(block, layer, r.page_in_block), r.first, r.end);
}

}  // namespace mtserve
