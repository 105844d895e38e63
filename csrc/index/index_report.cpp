// What the index tells about itself: gauges, lengths, and the check of its invariants.
#include <algorithm>
#include <map>

#include "index/index.h"

namespace mtserve {

using Lock = std::lock_guard<std::mutex>;

Counters Index::counters() const {
  Lock lock(mutex_);
  return counters_;
}

Gauges Index::gauges() const {
  Lock lock(mutex_);
  Gauges g;
  g.entries = static_cast<int64_t>(map_.size());
  g.open_batches = open_batches_;
  g.pages_total = pages_.total();
  g.pages_free = pages_.num_free();
  g.pages_clean = clean_pages_;
  g.pages_dirty = dirty_pages_;
  g.region_pages_total = region_.total();
  g.region_pages_free = region_.num_free();
  g.slots_total = slots_.total();
  g.slots_free = slots_.num_free();
  g.slots_largest_free = slots_.largest_free();
  g.pending_offload_tokens = pending_offload_tokens_;
  g.transfers_in_flight = transfers_;
  g.memory_bytes = static_cast<int64_t>(slabs_.size() * kSlab * sizeof(Entry) + free_entries_.capacity() * sizeof(EntryId) +
                                        map_.memory_bytes() + pages_.memory_bytes() + region_.memory_bytes() + slots_.memory_bytes());
  return g;
}

int64_t Index::user_bytes() const {
  Lock lock(mutex_);
  return static_cast<int64_t>(slabs_.size() * kSlab * sizeof(Entry) + free_entries_.capacity() * sizeof(EntryId) +
                              map_.memory_bytes());
}

Index::Lengths Index::lengths(int64_t user, uint32_t version) const {
  Lock lock(mutex_);
  const EntryId id = map_.find(user, version);
  if (id == kNoEntry) return {};
  const Entry& e = entry(id);
  return {std::min(e.committed(), e.cut), e.device, e.host};
}

std::string Index::check() const {
  Lock lock(mutex_);
  const auto fail = [](const std::string& what, int64_t a, int64_t b) {
    return what + ": " + std::to_string(a) + " and " + std::to_string(b);
  };
  std::vector<EntryId> page_owner(pages_.total(), kNoEntry);
  int64_t owned = 0, clean = 0, dirty = 0, alive = 0, attached = 0, slots = 0;
  std::map<SlotId, int32_t> block_ends;
  for (const PageId page : pages_.free_pages()) {
    if (page_owner[page] != kNoEntry) return fail("page is free twice", page, 0);
    page_owner[page] = INT32_MAX;
  }
  for (size_t i = 0; i < slabs_.size() * kSlab; ++i) {
    const EntryId id = static_cast<EntryId>(i);
    const Entry& e = entry(id);
    if (!e.alive) continue;
    ++alive;
    attached += !e.detached;
    owned += e.pages.size();
    for (const PageId page : e.pages) {
      if (page_owner[page] != kNoEntry) return fail("page has two owners", page, page_owner[page]);
      page_owner[page] = id;
    }
    int64_t room = 0;
    for (const Block& block : e.blocks) {
      slots += int64_t{1} << block.order;
      room += int64_t{config_.slot_tokens} << block.order;
      if (!block_ends.emplace(block.slot, block.slot + (1 << block.order)).second)
        return fail("slot has two owners", block.slot, id);
    }
    if (e.device > int64_t{e.pages.size()} * config_.page_size) return fail("device length exceeds its pages", e.device, e.pages.size());
    if (e.host > room) return fail("host length exceeds its blocks", e.host, room);
    if (e.device < e.host && e.device % config_.page_size) return fail("partial page below the host length", e.device, e.host);
    if (!e.detached && map_.find(e.user, e.version) != id) return fail("entry is not what the map finds", id, e.user);
    const bool listed = e.device_list != DeviceList::none || e.host_list != HostList::none;
    if (e.pins > 0 && listed) return fail("a pinned entry is evictable", id, e.pins);
    if (e.pins > 0) continue;
    if (e.pages.size() != pages_for(e.device)) return fail("unpinned entry holds reserved pages", e.pages.size(), e.device);
    if (e.writer || (e.offloading && e.in_transit == 0) || e.load != 0) return fail("unpinned entry is being written", id, 0);
    if (e.committed() == 0 && e.idle()) return fail("idle entry holds nothing", id, 0);
    if (!e.pages.empty()) {
      const auto wanted = e.device <= e.secured() ? DeviceList::clean : e.keep ? DeviceList::kept : DeviceList::dirty;
      if (e.device_list != wanted) return fail("entry is in the wrong device list", id, static_cast<int64_t>(wanted));
      (wanted == DeviceList::clean ? clean : dirty) += e.pages.size();
    }
    if (!e.blocks.empty() && e.idle() && e.host_list != (e.pages.empty() ? HostList::cold : HostList::warm))
      return fail("entry is in the wrong host list", id, static_cast<int64_t>(e.host_list));
  }
  SlotId last = 0;
  for (const auto& [slot, end] : block_ends) {
    if (slot < last) return fail("blocks overlap", slot, last);
    last = end;
  }
  if (owned + pages_.num_free() != pages_.total()) return fail("pages owned and free do not add up", owned, pages_.num_free());
  if (clean != clean_pages_ || dirty != dirty_pages_) return fail("evictable page counters are off", clean - clean_pages_, dirty - dirty_pages_);
  if (attached != static_cast<int64_t>(map_.size())) return fail("map and entries disagree", attached, map_.size());
  if (open_batches_ == 0 && transfers_ == 0 && region_.num_free() != region_.total())
    return fail("spans of the onload region leak", region_.num_free(), region_.total());
  if (!slots_.consistent()) return "free lists of the slot arena are broken";
  // Blocks of offloads in flight belong to their task until it is done.
  if (transfers_ == 0 && slots + slots_.num_free() != slots_.total()) return fail("slots owned and free do not add up", slots, slots_.num_free());
  if (transfers_ == 0 && pending_offload_tokens_ != 0) return fail("offload quota leaks", pending_offload_tokens_, 0);
  return {};
}

}  // namespace mtserve
