// Onloads and offloads: when they start, what becomes true when they end, what keeps the cold end clean.
#include "index/index.h"

#include <algorithm>

namespace mtserve {

using Lock = std::lock_guard<std::mutex>;

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
  e.load_first = task.first;
  e.load_end = into_pages ? end : e.device;
  pin(id);
  ++transfers_;
  ++counters_.onloads;
  counters_.onload_tokens += task.end - task.first;
  onloads.push_back(std::move(task));
  return true;
}

void Index::onload_done(const TransferTask& task, bool ok, std::vector<TransferTask>& next) {
  Lock lock(mutex_);
  --transfers_;
  region_.release(task.ticket, 0);
  Entry& e = entry(task.entry);
  e.load = 0;
  if (ok) {
    if (!task.pages.empty()) e.device = std::max(e.device, task.end);
    if (!is_retired(e.version)) plan_offload(task.entry, false, next);
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

}  // namespace mtserve
