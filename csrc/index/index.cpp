#include "index/index.h"

#include <algorithm>

#include "index/content_hash.h"

namespace mtserve {

using Lock = std::lock_guard<std::mutex>;

Index::Index(const IndexConfig& config)
    : config_(config),
      pages_(config.num_pages),
      region_(config.num_pages, config.region_pages),
      slots_(config.num_chunks, config.chunk_tokens / config.slot_tokens) {}

// ---- one batch --------------------------------------------------------------------------------------------------

void Index::begin(std::span<const RowRequest> requests, int32_t context_tokens, uint32_t version, Batch& batch,
                  std::vector<TransferTask>& onloads) {
  batch.context_tokens = context_tokens;
  batch.version = version;
  batch.rows.resize(requests.size());
  batch.context_keys.resize(requests.size());
  batch.hashes.resize(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    batch.rows[i].tokens = requests[i].tokens;
    batch.context_keys[i] = requests[i].context_key;
    if (requests[i].token_hashes != nullptr)
      batch.hashes[i] = hash_row(requests[i].token_hashes, context_tokens, requests[i].tokens, config_.page_size);
  }

  Lock lock(mutex_);
  batch.open = true;
  ++counters_.batches;
  counters_.requests += requests.size();
  for (const RowRequest& request : requests) counters_.history_tokens += request.tokens - context_tokens;
  if (open_batches_ >= config_.max_open_batches) {
    batch.uncached = true;
    ++counters_.refused_batches;
    return;
  }
  ++open_batches_;

  // Pins first: no row may evict what another row of the batch is about to read.
  enlist(requests, batch);
  for (size_t i = 0; i < requests.size(); ++i) {
    const bool leads = entry(batch.rows[i].entry).lead == static_cast<int32_t>(i);
    if (leads) grant(requests[i], i, true, batch, onloads);
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    const bool leads = entry(batch.rows[i].entry).lead == static_cast<int32_t>(i);
    if (!leads) grant(requests[i], i, false, batch, onloads);
  }

  // Pages row after row, now that every row has what it gets.
  int32_t total = 0;
  for (BatchRow& row : batch.rows) {
    row.first_page = total;
    total += row.num_pages;
  }
  batch.pages.resize(total);
  for (const BatchRow& row : batch.rows) {
    const IdList<PageId>& own = entry(row.entry).pages;
    const int32_t in_own = std::min(row.num_pages, own.size());
    std::copy_n(own.begin(), in_own, batch.pages.begin() + row.first_page);
    for (int32_t p = in_own; p < row.num_pages; ++p) batch.pages[row.first_page + p] = batch.cached_page(row, p);
  }
}

void Index::enlist(std::span<const RowRequest> requests, Batch& batch) {
  ++mark_;
  for (size_t i = 0; i < requests.size(); ++i) {
    EntryId id = map_.find(requests[i].user, batch.version);
    if (id == kNoEntry) id = create(requests[i].user, batch.version);
    batch.rows[i].entry = id;
    pin(id);
    Entry& e = entry(id);
    if (e.mark != mark_) {
      e.mark = mark_;
      e.mark_rows = 0;
      e.lead = static_cast<int32_t>(i);
    }
    ++e.mark_rows;
    if (requests[i].tokens > requests[e.lead].tokens) e.lead = static_cast<int32_t>(i);
  }
}

Index::Match Index::match(const Entry& e, const RowRequest& request, const PageHashes* hashes, int32_t context_tokens,
                          uint64_t context_key) const {
  const int32_t known = std::min(e.known(), e.cut);
  if (known == 0) return {};
  if (e.context != context_tokens || e.context_key != context_key) return {0, true};
  int32_t tokens = std::min(known, request.tokens);
  bool edited = false;
  if (hashes != nullptr) {
    if (e.hashes == nullptr) return {0, true};
    // A chain value stands for all pages before it, so the last agreeing page can be bisected.
    const auto& ours = e.hashes->chain;
    const auto& theirs = hashes->chain;
    const int32_t full = std::min<int32_t>(tokens / config_.page_size, static_cast<int32_t>(ours.size()));
    int32_t agree = full;
    if (full > 0 && ours[full - 1] != theirs[full - 1]) {
      agree = static_cast<int32_t>(std::mismatch(ours.begin(), ours.begin() + full, theirs.begin()).first - ours.begin());
      edited = true;
    }
    const int32_t verified = agree * config_.page_size;
    if (tokens > verified) {
      const uint64_t chain = agree > 0 ? theirs[agree - 1] : 0;
      const bool tail_agrees =
          !edited && tokens == e.hashes->tokens &&
          fold_range(chain, request.token_hashes, context_tokens, verified, tokens) == e.hashes->tail;
      if (!tail_agrees) {
        edited |= tokens == e.hashes->tokens;
        tokens = verified;
      }
    }
  }
  // Context rows alone are not worth a hit: a row either skips them and reads history, or computes both.
  if (tokens <= context_tokens) tokens = 0;
  return {tokens, edited};
}

void Index::grant(const RowRequest& request, size_t row_index, bool leads, Batch& batch,
                  std::vector<TransferTask>& onloads) {
  BatchRow& row = batch.rows[row_index];
  const EntryId id = row.entry;
  Entry& e = entry(id);
  const PageHashes* hashes = request.token_hashes != nullptr ? &batch.hashes[row_index] : nullptr;
  Match found = match(e, request, hashes, batch.context_tokens, request.context_key);
  if (leads && found.tokens < std::min(e.known(), e.cut)) {
    ++(found.edited ? counters_.edited_rows : counters_.truncated_rows);
    if (e.pins == e.mark_rows && e.in_transit == 0)
      shorten(id, found.tokens);
    else
      e.cut = found.tokens;  // others read it: cut when the last pin drops
  }

  int32_t cached = std::min(found.tokens, e.committed());
  if (cached <= batch.context_tokens) cached = 0;
  const bool has_news = leads && row.tokens > cached && !is_retired(batch.version);
  bool stores = has_news && !e.writer && e.cut == kNoCut && cached == e.committed();
  if (has_news && e.writer) ++counters_.rows_busy;

  // Pages: for the delta too if there is room, else for what has to be loaded, else for nothing new.
  const bool can_grow = !e.writer;
  int32_t load_end = 0;
  const RegionRead* region = e.load != 0 ? batch.region_of(e.load) : nullptr;
  if (region != nullptr && cached > e.resident()) {
    // Another row of this batch has it brought to the region alone.
    cached = std::min(cached, region->end);
    stores = false;
  } else if (cached > e.resident()) {
    if (can_grow && e.load == 0 && e.in_transit == 0) {  // the offload may be about to replace the block
      load_end = e.cut == kNoCut ? e.host : std::min(e.host, pages_for(cached) * config_.page_size);
    } else {
      cached = e.resident();
      stores = false;
    }
  }
  Fence after = 0;
  if (stores && !grow(id, pages_for(row.tokens), after)) {
    stores = false;
    ++counters_.rows_without_room;
  }
  const int32_t on_device = std::min(cached, e.device);
  if (load_end > 0) {
    const bool into_pages = grow(id, pages_for(load_end), after);
    if (!into_pages && !has_news) ++counters_.rows_without_room;
    stores &= into_pages;
    if ((into_pages || config_.read_region) && start_onload(id, into_pages ? load_end : cached, into_pages, after, onloads)) {
      const TransferTask& task = onloads.back();
      if (config_.read_region && task.region >= 0) {
        batch.regions.push_back({task.ticket, task.first, task.end, task.region});
        region_.hold(task.ticket);
        region = &batch.regions.back();
      }
      counters_.rows_from_region += !into_pages;
    } else {
      cached = e.resident();
    }
  }
  if (cached <= batch.context_tokens) cached = 0;
  if (e.load != 0 && cached > 0) batch.loads.push_back(e.load);
  if (region != nullptr && cached > region->first) {
    row.region_from = region->first / config_.page_size;
    row.region_page = region->page;
  }

  row.epoch = e.epoch;
  row.cached = cached;
  row.stores = stores;
  row.num_pages = pages_for(stores ? row.tokens : cached);
  if (stores) e.writer = true;
  // A row that stores may write pages that an aborted batch reserved and never gave back, others holding the entry.
  batch.after = std::max({batch.after, after, cached > 0 || stores ? e.last_use : 0});

  const auto history = [&](int32_t tokens) { return std::max(tokens - batch.context_tokens, 0); };
  counters_.device_hit_tokens += history(std::min(on_device, cached));
  counters_.host_hit_tokens += history(cached) - history(std::min(on_device, cached));
}

bool Index::is_short_of_pages(std::span<const RowRequest> requests, uint32_t version) const {
  std::unordered_map<int64_t, int32_t> wanted;  // pages per user
  for (const RowRequest& request : requests) {
    int32_t& pages = wanted[request.user];
    pages = std::max(pages, pages_for(request.tokens));
  }
  Lock lock(mutex_);
  int64_t needed = 0, available = pages_.num_free() + clean_pages_ + dirty_pages_, owned = 0;
  for (const auto& [user, pages] : wanted) {
    const EntryId id = map_.find(user, version);
    const int32_t has = id == kNoEntry ? 0 : entry(id).pages.size();
    needed += std::max(pages - has, 0);
    owned += has;
    if (has > 0 && entry(id).pins == 0) available -= has;  // the batch's own pages are no victims
  }
  return needed > available && needed + owned <= pages_.total();
}

// Makes the entry own at least `pages` pages, or changes nothing.
bool Index::grow(EntryId id, int32_t pages, Fence& after) {
  Entry& e = entry(id);
  const int32_t missing = pages - e.pages.size();
  if (missing <= 0) return true;
  recent_need_ = std::max(recent_need_, missing);
  if (!reclaim_pages(missing)) return false;
  after = std::max(after, pages_.take(missing, e.pages));
  return true;
}

Fence Index::commit(Batch& batch, std::vector<TransferTask>& offloads) {
  Lock lock(mutex_);
  ++counters_.commits;
  const bool retired = is_retired(batch.version);
  for (size_t i = 0; i < batch.rows.size() && !batch.uncached; ++i) {
    const BatchRow& row = batch.rows[i];
    if (!row.stores) continue;
    Entry& e = entry(row.entry);
    if (e.detached || e.epoch != row.epoch || retired) {
      ++counters_.unpublished_rows;
      continue;
    }
    e.device = row.tokens;
    e.context = batch.context_tokens;
    e.context_key = batch.context_keys[i];
    const PageHashes& hashes = batch.hashes[i];
    e.hashes = hashes.tokens > 0 ? std::make_unique<PageHashes>(hashes) : nullptr;
    counters_.stored_tokens += row.tokens - row.cached;
    plan_offload(row.entry, false, offloads);
  }
  const Fence fence = finish(batch);
  write_back_cold(offloads);
  return fence;
}

Fence Index::abort(Batch& batch, bool abandoned) {
  Lock lock(mutex_);
  ++counters_.aborts;
  counters_.abandoned_batches += abandoned;
  return finish(batch);
}

Fence Index::finish(Batch& batch) {
  batch.open = false;
  ++fence_;
  if (batch.uncached) return fence_;
  --open_batches_;
  for (const BatchRow& row : batch.rows) {
    Entry& e = entry(row.entry);
    e.last_use = fence_;
    e.tick = ++tick_;
    e.keep = false;
    if (row.stores) e.writer = false;
    unpin(row.entry);
  }
  for (const RegionRead& region : batch.regions) region_.release(region.load, fence_);
  recent_need_ -= recent_need_ / 64;
  return fence_;
}

// ---- transfers --------------------------------------------------------------------------------------------------

// Without pages to bring it to, what is loaded stays in the region; false when that has no room.
bool Index::start_onload(EntryId id, int32_t end, bool into_pages, Fence after, std::vector<TransferTask>& onloads) {
  Entry& e = entry(id);
  TransferTask task;
  task.ticket = next_ticket_ + 1;
  task.entry = id;
  task.first = e.device;  // the first token of a page, since it is below the host length
  task.end = end;
  const int32_t first_page = task.first / config_.page_size;
  task.after = std::max(after, e.last_use);  // an aborted writer may have left its pages with the entry
  if (config_.region_pages > 0) task.region = region_.take(task.ticket, pages_for(end) - first_page, task.after);
  if (!into_pages && task.region < 0) return false;
  ++next_ticket_;
  if (into_pages) task.pages.assign(e.pages.begin() + first_page, e.pages.begin() + pages_for(end));
  task.blocks.assign(e.blocks.begin() + task.first / config_.chunk_tokens,
                     e.blocks.begin() + (end + config_.chunk_tokens - 1) / config_.chunk_tokens);
  e.load = task.ticket;
  e.load_end = into_pages ? end : e.device;
  pin(id);
  ++transfers_;
  ++counters_.onloads;
  counters_.onload_tokens += task.end - task.first;
  onloads.push_back(std::move(task));
  return true;
}

void Index::onload_done(const TransferTask& task, bool ok) {
  Lock lock(mutex_);
  --transfers_;
  region_.release(task.ticket, 0);
  Entry& e = entry(task.entry);
  e.load = 0;
  if (ok) {
    if (!task.pages.empty()) e.device = std::max(e.device, task.end);
  } else {
    // What could not be read does not count as cached, nor does what was computed from it and published meanwhile.
    // Pages stay until the last reader is gone.
    ++counters_.onload_failures;
    const int32_t before = std::min(e.known(), e.cut);
    e.cut = std::min(e.cut, task.first);
    if (!e.detached && !is_retired(e.version)) counters_.lost_tokens += std::max(before - e.cut, 0);
  }
  unpin(task.entry);
}

void Index::prefetch(std::span<const int64_t> users, uint32_t version, std::vector<TransferTask>& onloads) {
  Lock lock(mutex_);
  for (const int64_t user : users) {
    const EntryId id = map_.find(user, version);
    if (id == kNoEntry) continue;
    Entry& e = entry(id);
    if (e.load != 0 || e.writer || e.in_transit != 0 || e.cut != kNoCut || e.device >= e.host) continue;
    pin(id);  // growing must not evict the user itself
    Fence after = 0;
    e.tick = ++tick_;
    if (grow(id, pages_for(e.host), after)) start_onload(id, e.host, true, after, onloads);
    unpin(id);
  }
}

Index::Plan Index::plan_offload(EntryId id, bool with_tail, std::vector<TransferTask>& offloads) {
  Entry& e = entry(id);
  const int32_t chunk = config_.chunk_tokens;
  if (!has_host() || e.offloading || e.detached || e.load != 0) return Plan::nothing;
  TransferTask task;
  task.entry = id;
  task.end = with_tail ? e.device : e.device / chunk * chunk;
  if (task.end <= e.host) return Plan::nothing;
  task.first = write_from(e, task.end);
  const int64_t room = config_.offload_quota_tokens - pending_offload_tokens_;
  if (task.end - task.first > room) {
    task.end = static_cast<int32_t>((task.first + std::max<int64_t>(room, 0)) / chunk * chunk);
    if (task.end <= e.host) {
      ++counters_.offloads_refused_quota;
      return Plan::no_quota;
    }
  }
  pin(id);  // making room on the host must not take this user's own blocks
  if (!reserve_blocks(e, task)) {
    ++counters_.offloads_refused_host_full;
    e.keep = true;
    unpin(id);
    return Plan::host_full;
  }
  task.ticket = ++next_ticket_;
  task.pages.assign(e.pages.begin() + task.first / config_.page_size, e.pages.begin() + pages_for(task.end));
  e.offloading = true;
  pending_offload_tokens_ += task.end - task.first;
  ++transfers_;
  ++counters_.offloads;
  counters_.tail_write_backs += task.end % chunk != 0;
  offloads.push_back(std::move(task));
  return Plan::planned;
}

// Where a write up to `end` starts: the partial last chunk is continued in place while its block has room, rewritten
// otherwise.
int32_t Index::write_from(const Entry& e, int32_t end) const {
  const int32_t c = e.host / config_.chunk_tokens, start = c * config_.chunk_tokens;
  if (c == e.blocks.size()) return e.host;
  return std::min(end - start, config_.chunk_tokens) <= config_.slot_tokens << e.blocks[c].order ? e.host : start;
}

// Finds blocks for the task's chunks. May shorten the task when host memory runs out.
bool Index::reserve_blocks(const Entry& e, TransferTask& task) {
  const int32_t chunk = config_.chunk_tokens;
  int32_t c = task.first / chunk;
  const auto tokens_in = [&](int32_t index) { return std::min(task.end - index * chunk, chunk); };
  const auto slots_for = [&](int32_t tokens) { return (tokens + config_.slot_tokens - 1) / config_.slot_tokens; };
  if (task.first > c * chunk) task.blocks.push_back(e.blocks[c++]);
  for (; c * chunk < task.end; ++c) {
    Block block;
    if (!allocate_block(slots_.order_for(slots_for(tokens_in(c))), block)) {
      task.end = c * chunk;
      break;
    }
    slots_.hold(block);
    task.blocks.push_back(block);
  }
  return task.end > e.host;
}

void Index::publish_blocks(Entry& e, const TransferTask& task) {
  int32_t c = task.first / config_.chunk_tokens;
  for (const Block& block : task.blocks) {
    if (c == e.blocks.size()) {
      e.blocks.push_back(block);
    } else if (e.blocks[c].slot != block.slot || e.blocks[c].order != block.order) {
      slots_.release(e.blocks[c]);
      free_block(e.blocks[c]);
      e.blocks[c] = block;
    }
    ++c;
  }
  e.host = std::max(e.host, task.end);
}

void Index::drop_blocks(const Entry& e, const TransferTask& task) {
  int32_t c = task.first / config_.chunk_tokens;
  for (const Block& block : task.blocks) {
    const bool in_place = c < e.blocks.size() && e.blocks[c].slot == block.slot;
    if (!in_place) {
      slots_.release(block);
      free_block(block);
    }
    ++c;
  }
}

void Index::offload_done(const TransferTask& task, bool ok, std::vector<TransferTask>& next) {
  Lock lock(mutex_);
  --transfers_;
  pending_offload_tokens_ -= task.end - task.first;
  Entry& e = entry(task.entry);
  if (e.in_transit > 0) {
    pin(task.entry);
    if (!ok && !e.detached && !is_retired(e.version))
      counters_.lost_tokens += std::max(std::min(e.in_transit, e.cut) - e.committed(), 0);
    e.in_transit = 0;
  }
  e.offloading = false;
  if (ok && !e.detached) {
    publish_blocks(e, task);
    counters_.offload_tokens += task.end - task.first;
    plan_offload(task.entry, false, next);
  } else {
    drop_blocks(e, task);
    if (!ok) {
      ++counters_.offload_failures;
      e.keep = true;  // tried again at the next visit
    }
  }
  unpin(task.entry);
  write_back_cold(next);
}

void Index::offload_gathered(const TransferTask& task) {
  Lock lock(mutex_);
  entry(task.entry).in_transit = task.end;
  unpin(task.entry);
}

// Keeps the cold end clean, so that no tail is lost: enough clean or free pages that the next batches find room without
// dropping anything unpersisted.
void Index::write_back_cold(std::vector<TransferTask>& offloads) {
  if (!config_.tail_write_back || !has_host()) return;
  constexpr int kTries = 64;  // bounds the work of one call; the next call goes on
  for (int i = 0; i < kTries; ++i) {
    const int64_t soon_clean = pending_offload_tokens_ / config_.page_size;
    if (pages_.num_free() + clean_pages_ + soon_clean >= clean_target()) return;
    if (!write_back_coldest(offloads)) return;
  }
}

// False when there is nothing to write or the quota is used up.
bool Index::write_back_coldest(std::vector<TransferTask>& offloads) {
  const EntryId id = dirty_.coldest();
  if (id == kNoEntry || entry(id).offloading) return false;
  if (is_retired(entry(id).version)) {
    unlist(id);
    erase(id);
    return true;
  }
  return plan_offload(id, true, offloads) != Plan::no_quota;
}

int64_t Index::clean_target() const {
  const int64_t pages = pages_.total();
  return std::min(pages, std::max(pages / 8, int64_t{16} * recent_need_));
}

void Index::plan_flush(std::vector<TransferTask>& offloads) {
  Lock lock(mutex_);
  if (!has_host()) return;
  while (write_back_coldest(offloads)) {
  }
}

// ---- eviction ---------------------------------------------------------------------------------------------------

bool Index::reclaim_pages(int32_t wanted) {
  if (pages_.num_free() + clean_pages_ + dirty_pages_ < wanted) return false;
  while (pages_.num_free() < wanted) {
    const EntryId id = clean_.empty() ? coldest_dirty() : clean_.coldest();
    evict_from_device(id, wanted - pages_.num_free());
  }
  return true;
}

EntryId Index::coldest_dirty() {
  if (dirty_.empty()) return kept_.coldest();
  if (kept_.empty()) return dirty_.coldest();
  return entry(dirty_.coldest()).tick < entry(kept_.coldest()).tick ? dirty_.coldest() : kept_.coldest();
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

// ---- operators' calls -------------------------------------------------------------------------------------------

void Index::evict(std::span<const int64_t> users) {
  Lock lock(mutex_);
  std::vector<uint32_t> versions;
  for (const auto& [version, entries] : versions_) versions.push_back(version);
  for (const int64_t user : users)
    for (const uint32_t version : versions)
      if (const EntryId id = map_.find(user, version); id != kNoEntry) detach(id);
}

void Index::clear() {
  Lock lock(mutex_);
  std::vector<EntryId> all;
  map_.for_each([&](EntryId id) { all.push_back(id); });
  for (const EntryId id : all) detach(id);
}

void Index::retire_version(uint32_t version) {
  Lock lock(mutex_);
  retired_.insert(version);
}

bool Index::is_retired(uint32_t version) const { return !retired_.empty() && retired_.contains(version); }

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
