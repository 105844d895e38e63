// The vocabulary of the control plane. Nothing here knows bytes, tensors or devices.
#pragma once

#include <cstdint>
#include <vector>

namespace mtserve {

using EntryId = int32_t;  // index into the entry slab
using PageId = int32_t;
using SlotId = int32_t;
using Ticket = uint64_t;  // names one transfer; 0 means none
using Fence = uint64_t;   // names a moment: everything that used a page up to the commit or abort with this number

inline constexpr EntryId kNoEntry = -1;

struct IndexConfig {
  int32_t page_size = 32;
  int32_t num_pages = 0;
  int32_t chunk_tokens = 1024;
  int32_t slot_tokens = 128;  // chunk_tokens / slot_tokens is a power of two
  int32_t num_chunks = 0;     // 0: no host tier
  int64_t offload_quota_tokens = 65536;
  bool tail_write_back = true;
  int32_t max_open_batches = 64;
  int32_t region_pages = 0;  // of the onload region, behind the others; 0: onloads go straight into pages
  bool read_region = false;  // batches read what they brought from the region, before it is scattered (paper 4.1)
};

// A run of 2^order adjacent slots of the host arena.
struct Block {
  SlotId slot = -1;
  int32_t order = 0;
};

// One request row as the caller asks for it. Tokens are context rows plus history.
struct RowRequest {
  int64_t user = 0;
  int32_t tokens = 0;
  uint64_t context_key = 0;
  const uint64_t* token_hashes = nullptr;  // one per history token, or null: content is not checked
};

// What begin granted to one row.
struct BatchRow {
  EntryId entry = kNoEntry;
  uint32_t epoch = 0;
  int32_t tokens = 0;      // context + history
  int32_t cached = 0;      // of these, read from pages
  int32_t first_page = 0;  // into Batch::pages
  int32_t num_pages = 0;   // pages that hold the cached tokens, and the delta's where the row stores
  bool stores = false;
  int32_t region_from = 0;   // from this page of the row on, cached tokens are read from the region ...
  PageId region_page = -1;   // ... at this and the following ids; -1: from the row's own pages
};

// Tokens [first, end) of one entry to be moved between pages and host blocks.
struct TransferTask {
  Ticket ticket = 0;
  EntryId entry = kNoEntry;
  int32_t first = 0;
  int32_t end = 0;
  Fence after = 0;             // onload: pages may be written once everything up to here is done
  PageId region = -1;          // onload: first page of the span where it lands; -1: straight into `pages`
  std::vector<PageId> pages;   // of the page that holds `first` and the following ones; none: it stays in the region
  std::vector<Block> blocks;   // of the chunk that holds `first` and the following ones
};

struct PageHashes {
  std::vector<uint64_t> chain;  // chain[i] covers all tokens of pages 0..i
  uint64_t tail = 0;            // chain value over the tokens behind the last full page
  int32_t tokens = 0;           // context + history tokens covered
};

// A span of the onload region that a batch brought and reads.
struct RegionRead {
  Ticket load = 0;
  int32_t first = 0, end = 0;  // tokens
  PageId page = -1;            // where `first` lies
};

struct Batch {
  std::vector<BatchRow> rows;
  std::vector<PageId> pages;          // row after row
  std::vector<Ticket> loads;          // onloads this batch depends on, whoever started them
  std::vector<RegionRead> regions;    // those of them that it reads from the region
  std::vector<PageHashes> hashes;     // per row, empty when content is not checked
  std::vector<uint64_t> context_keys; // per row
  int32_t context_tokens = 0;
  uint32_t version = 0;
  Fence after = 0;  // pages may be written, and committed rows read, once everything up to here is done
  bool open = false;
  bool uncached = false;  // refused: nothing is read or stored

  // The page from which the tokens of a row's p-th page are read.
  PageId cached_page(const BatchRow& row, int32_t p) const {
    return row.region_page >= 0 && p >= row.region_from ? row.region_page + (p - row.region_from) : pages[row.first_page + p];
  }
  const RegionRead* region_of(Ticket load) const {
    for (const RegionRead& region : regions)
      if (region.load == load) return &region;
    return nullptr;
  }
  bool stores() const {
    for (const BatchRow& row : rows)
      if (row.stores) return true;
    return false;
  }
};

// Counters only rise.
struct Counters {
  uint64_t batches = 0, requests = 0, commits = 0, aborts = 0, refused_batches = 0, abandoned_batches = 0;
  uint64_t history_tokens = 0;      // asked for
  uint64_t device_hit_tokens = 0;   // of these, found in pages
  uint64_t host_hit_tokens = 0;     // of these, found in host memory and brought to pages
  uint64_t stored_tokens = 0;       // committed
  uint64_t rows_without_room = 0;   // scored, but not stored: no page could be had
  uint64_t rows_from_region = 0;    // read from the onload region alone: no page could be had
  uint64_t rows_busy = 0;           // scored, but not stored: another batch was writing this user
  uint64_t unpublished_rows = 0;    // evicted, or version retired, between begin and commit
  uint64_t edited_rows = 0;         // content or context differed from what was cached
  uint64_t truncated_rows = 0;      // came back with a shorter history than was cached
  uint64_t device_evicted_pages = 0, host_evicted_tokens = 0;
  uint64_t lost_tokens = 0;         // committed once, now in neither tier, by eviction or by a failed copy
  uint64_t onloads = 0, onload_tokens = 0, onload_failures = 0;
  uint64_t offloads = 0, offload_tokens = 0, offload_failures = 0, tail_write_backs = 0;
  uint64_t offloads_refused_quota = 0, offloads_refused_host_full = 0;
};

struct Gauges {
  int64_t entries = 0, open_batches = 0;
  int64_t pages_total = 0, pages_free = 0, pages_clean = 0, pages_dirty = 0;
  int64_t region_pages_total = 0, region_pages_free = 0;
  int64_t slots_total = 0, slots_free = 0, slots_largest_free = 0;
  int64_t pending_offload_tokens = 0, transfers_in_flight = 0;
  int64_t memory_bytes = 0;  // of the index, page and slot ids of users not included
};

}  // namespace mtserve
