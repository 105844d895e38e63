// What batches ask of the index: begin, commit, abort; and what operators ask.
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
  if (e.load != 0 && cached > e.load_first) batch.loads.push_back(e.load);
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

}  // namespace mtserve
