// Who leaves when room is needed, and where an entry stands in the lists.
#include "index/index.h"

#include <algorithm>

namespace mtserve {

using Lock = std::lock_guard<std::mutex>;

// ---- eviction ---------------------------------------------------------------------------------------------------

bool Index::reclaim_pages(int32_t wanted) {
  if (pages_.num_free() + clean_pages_ + dirty_pages_ < wanted) return false;
  while (pages_.num_free() < wanted) {
    const EntryId clean = clean_.coldest(), kept = kept_.coldest();
    const EntryId id = clean == kNoEntry && kept == kNoEntry ? dirty_.coldest() : colder(clean, kept);
    evict_from_device(id, wanted - pages_.num_free());
  }
  return true;
}

// Of two that may be none.
EntryId Index::colder(EntryId a, EntryId b) const {
  if (a == kNoEntry || b == kNoEntry) return a == kNoEntry ? b : a;
  return entry(a).tick < entry(b).tick ? a : b;
}

// From the end, in whole pages: what is left is a prefix.
void Index::evict_from_device(EntryId id, int32_t pages) {
  unlist(id);
  Entry& e = entry(id);
  const int32_t before = e.committed();
  const int32_t keep = e.pages.size() - std::min(pages, e.pages.size());
  counters_.device_evicted_pages += e.pages.size() - keep;
  pages_.give_back(e.pages, keep, e.last_use);
  e.device = std::min(e.device, keep * config_.page_size);
  count_lost(e, before);
  if (e.idle() && e.committed() == 0)
    erase(id);
  else
    list(id);
}

bool Index::allocate_block(int32_t order, Block& block) {
  if (slots_.allocate(order, block)) return true;
  if (!slots_.can_empty_a_chunk()) return false;
  while (!slots_.allocate(order, block)) evict_from_host(cold_.empty() ? warm_.coldest() : cold_.coldest());
  return true;
}

void Index::evict_from_host(EntryId id) {
  unlist(id);
  Entry& e = entry(id);
  const int32_t before = e.committed(), persisted = e.host;
  free_blocks(e, (e.blocks.size() - 1) * config_.chunk_tokens);
  counters_.host_evicted_tokens += persisted - e.host;
  e.keep = true;
  count_lost(e, before);
  if (e.committed() == 0)
    erase(id);
  else
    list(id);
}

// Frees the blocks behind the first `tokens` tokens.
void Index::free_blocks(Entry& e, int32_t tokens) {
  const int32_t keep = (tokens + config_.chunk_tokens - 1) / config_.chunk_tokens;
  while (e.blocks.size() > keep) {
    if (!e.idle()) slots_.release(e.blocks.back());
    free_block(e.blocks.back());
    e.blocks.pop_back();
  }
  e.host = std::min(e.host, tokens);
}

void Index::free_block(Block block) {
  slots_.free(block);
  freed_blocks_.push_back(block);
}

void Index::take_freed_blocks(std::vector<Block>& blocks) {
  Lock lock(mutex_);
  blocks.insert(blocks.end(), freed_blocks_.begin(), freed_blocks_.end());
  freed_blocks_.clear();
}

void Index::count_lost(const Entry& e, int32_t before) {
  if (!is_retired(e.version)) counters_.lost_tokens += std::max(std::min(before, e.cut) - std::max(e.device, e.secured()), 0);
}

// Cuts both prefixes. The entry must be idle apart from the batch that asks.
void Index::shorten(EntryId id, int32_t tokens) {
  Entry& e = entry(id);
  ++e.epoch;
  e.device = std::min(e.device, tokens);
  pages_.give_back(e.pages, pages_for(e.device), e.last_use);
  free_blocks(e, tokens);
  if (e.hashes != nullptr && e.hashes->tokens > tokens) {
    PageHashes& hashes = *e.hashes;
    hashes.chain.resize(tokens / config_.page_size);
    hashes.tokens = static_cast<int32_t>(hashes.chain.size()) * config_.page_size;
    hashes.tail = hashes.chain.empty() ? 0 : hashes.chain.back();
  }
}

// ---- entries ----------------------------------------------------------------------------------------------------

EntryId Index::create(int64_t user, uint32_t version) {
  if (free_entries_.empty()) {
    const EntryId first = static_cast<EntryId>(slabs_.size()) * kSlab;
    slabs_.push_back(std::make_unique<Entry[]>(kSlab));
    for (EntryId id = first + kSlab; id-- > first;) free_entries_.push_back(id);
  }
  const EntryId id = free_entries_.back();
  free_entries_.pop_back();
  Entry& e = entry(id);
  e.user = user;
  e.version = version;
  e.alive = true;
  map_.insert(user, version, id);
  ++versions_[version];
  return id;
}

void Index::detach(EntryId id) {
  Entry& e = entry(id);
  map_.erase(e.user, e.version);
  if (--versions_[e.version] == 0) versions_.erase(e.version);
  e.detached = true;
  ++e.epoch;
  if (e.pins > 0) return;
  unlist(id);
  settle(id);
}

// The entry must be idle and in no list.
void Index::erase(EntryId id) {
  Entry& e = entry(id);
  pages_.give_back(e.pages, 0, e.last_use);
  free_blocks(e, 0);
  if (!e.detached) {
    map_.erase(e.user, e.version);
    if (--versions_[e.version] == 0) versions_.erase(e.version);
  }
  const uint32_t epoch = e.epoch + 1;
  std::destroy_at(&e);
  std::construct_at(&e);
  e.epoch = epoch;  // whoever still names this entry is told apart
  free_entries_.push_back(id);
}

// Blocks are held as long as the entry is not idle.
void Index::pin(EntryId id) {
  Entry& e = entry(id);
  if (e.pins++ > 0) return;
  unlist(id);
  if (e.in_transit == 0)
    for (const Block& block : e.blocks) slots_.hold(block);
}

void Index::unpin(EntryId id) {
  Entry& e = entry(id);
  if (--e.pins > 0) return;
  if (e.idle())
    for (const Block& block : e.blocks) slots_.release(block);
  settle(id);
}

// The last pin dropped.
void Index::settle(EntryId id) {
  Entry& e = entry(id);
  if (e.idle() && e.cut != kNoCut) {
    shorten(id, e.cut);
    e.cut = kNoCut;
  }
  pages_.give_back(e.pages, e.detached ? 0 : pages_for(e.device), e.last_use);  // reserved, but not published
  if (e.detached) e.device = 0;
  if (e.idle() && (e.detached || e.committed() == 0 || is_retired(e.version)))
    erase(id);
  else
    list(id);
}

void Index::list(EntryId id) {
  Entry& e = entry(id);
  DeviceNodes device{*this};
  HostNodes host{*this};
  if (!e.pages.empty()) {
    e.device_list = e.device <= e.secured() ? DeviceList::clean : e.keep ? DeviceList::kept : DeviceList::dirty;
    (e.device_list == DeviceList::clean ? clean_pages_ : dirty_pages_) += e.pages.size();
    auto& list = e.device_list == DeviceList::clean ? clean_ : e.device_list == DeviceList::dirty ? dirty_ : kept_;
    list.insert(device, id);
  }
  if (!e.blocks.empty() && e.idle()) {
    e.host_list = e.pages.empty() ? HostList::cold : HostList::warm;
    (e.host_list == HostList::cold ? cold_ : warm_).insert(host, id);
  }
}

void Index::unlist(EntryId id) {
  Entry& e = entry(id);
  DeviceNodes device{*this};
  HostNodes host{*this};
  if (e.device_list != DeviceList::none) {
    (e.device_list == DeviceList::clean ? clean_pages_ : dirty_pages_) -= e.pages.size();
    auto& list = e.device_list == DeviceList::clean ? clean_ : e.device_list == DeviceList::dirty ? dirty_ : kept_;
    list.remove(device, id);
    e.device_list = DeviceList::none;
  }
  if (e.host_list != HostList::none) {
    (e.host_list == HostList::cold ? cold_ : warm_).remove(host, id);
    e.host_list = HostList::none;
  }
}

}  // namespace mtserve
