// The control plane: who has what where. Users, pages, slots, LRU order, pins, versions (paper 4.3).
//
// The index never touches bytes and never waits: it hands out plans (Batch, TransferTask), others carry them out and
// report back. Every public method takes the lock, a leaf: nothing else is locked or called under it.
//
// Two prefixes per entry: device [0, device), host [0, host); committed = max of both. An entry is *idle* when nobody
// holds a pin and no offload is under way; only idle entries are truncated or lose host blocks. Forgetting a user detaches its entry from the map at once,
// so that new begins miss, and frees it when the last pin drops.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "index/id_list.h"
#include "index/lru.h"
#include "index/onload_region.h"
#include "index/page_pool.h"
#include "index/slot_arena.h"
#include "index/types.h"
#include "index/user_map.h"

namespace mtserve {

class Index {
 public:
  explicit Index(const IndexConfig& config);

  // ---- one batch (Algorithm 1, steps 1, 2 and 8) ----

  // Grants cached prefixes, reserves pages, plans onloads. `batch` must be fresh.
  void begin(std::span<const RowRequest> requests, int32_t context_tokens, uint32_t version, Batch& batch,
             std::vector<TransferTask>& onloads);
  // Publishes all rows that store; returns the fence that stands for this moment. Offloads are planned.
  Fence commit(Batch& batch, std::vector<TransferTask>& offloads);
  // True when a batch would find too few pages now, although it would find enough once nobody else is busy.
  bool is_short_of_pages(std::span<const RowRequest> requests, uint32_t version) const;
  // Gives back what begin reserved; publishes nothing.
  Fence abort(Batch& batch, bool abandoned);

  // ---- transfers ----

  // `next` receives the offload of what was committed while the onload was on its way.
  void onload_done(const TransferTask& task, bool ok, std::vector<TransferTask>& next);
  // The task's pages have been read into a buffer: they may be evicted although the host does not have them yet.
  void offload_gathered(const TransferTask& task);
  // `next` receives tasks for which there is room again.
  void offload_done(const TransferTask& task, bool ok, std::vector<TransferTask>& next);
  void prefetch(std::span<const int64_t> users, uint32_t version, std::vector<TransferTask>& onloads);
  // Offloads for as many dirty users as the quota admits, coldest first. Empty when nothing is left to write.
  void plan_flush(std::vector<TransferTask>& offloads);

  // ---- operators' calls ----

  void evict(std::span<const int64_t> users);
  void clear();
  void retire_version(uint32_t version);

  // Moves the blocks freed since the last call to the end of `blocks`.
  void take_freed_blocks(std::vector<Block>& blocks);

  Counters counters() const;
  Gauges gauges() const;
  int64_t user_bytes() const;  // entries and map, without page and slot ids
  // Tokens of a user that a new begin would find: committed, in pages, on the host; -1 each for an unknown user.
  struct Lengths {
    int32_t committed = -1, device = -1, host = -1;
  };
  Lengths lengths(int64_t user, uint32_t version) const;
  // Walks everything and checks the invariants; empty when they hold. For tests.
  std::string check() const;

 private:
  enum class DeviceList : uint8_t { none, clean, dirty, kept };
  enum class HostList : uint8_t { none, cold, warm };

  struct Entry {
    int64_t user = 0;
    uint64_t tick = 0;  // of the last request
    Fence last_use = 0;
    Ticket load = 0;  // onload in flight
    uint64_t context_key = 0;
    std::unique_ptr<PageHashes> hashes;
    IdList<PageId> pages;
    IdList<Block> blocks;
    LruLink device_link, host_link;
    uint32_t version = 0;
    uint32_t epoch = 0;
    int32_t device = 0;
    int32_t host = 0;      // persisted
    int32_t load_first = 0;  // what lies before is read without waiting for the onload
    int32_t load_end = 0;  // device length once the onload is done
    int32_t cut = kNoCut;  // truncate to this when idle
    int32_t context = 0;
    int32_t pins = 0;
    uint32_t mark = 0;       // the begin that last met this entry ...
    int32_t mark_rows = 0;   // ... its rows there ...
    int32_t lead = 0;        // ... and the longest of them, the only one that may store
    DeviceList device_list = DeviceList::none;
    HostList host_list = HostList::none;
    bool alive = false;
    bool detached = false;    // forgotten: no longer in the map
    bool writer = false;      // an open batch stores to it
    bool offloading = false;
    int32_t in_transit = 0;  // tokens that an offload has read from the pages and not yet written to the host
    bool keep = false;        // dirty, but not written back before its next request

    int32_t committed() const { return device > host ? device : host; }
    // Tokens that are in pages, or will be.
    int32_t resident() const { return load != 0 && load_end > device ? load_end : device; }
    // Tokens whose content is settled: what was committed, though its end may be on its way to the host and in no tier.
    int32_t known() const { return committed() > in_transit ? committed() : in_transit; }
    // What survives when the pages go, if the offload in flight succeeds.
    int32_t secured() const { return host > in_transit ? host : in_transit; }
    // Nobody reads, writes or moves it.
    bool idle() const { return pins == 0 && in_transit == 0; }
  };
  static constexpr int32_t kNoCut = INT32_MAX;

  struct DeviceNodes {
    Index& index;
    LruLink& link(EntryId id) { return index.entry(id).device_link; }
    uint64_t tick(EntryId id) { return index.entry(id).tick; }
  };
  struct HostNodes {
    Index& index;
    LruLink& link(EntryId id) { return index.entry(id).host_link; }
    uint64_t tick(EntryId id) { return index.entry(id).tick; }
  };

  // Entries live in fixed slabs: they never move, and growing copies nothing.
  static constexpr int32_t kSlab = 1024;
  Entry& entry(EntryId id) { return slabs_[id / kSlab][id % kSlab]; }
  const Entry& entry(EntryId id) const { return slabs_[id / kSlab][id % kSlab]; }
  int32_t pages_for(int32_t tokens) const { return (tokens + config_.page_size - 1) / config_.page_size; }
  bool has_host() const { return config_.num_chunks > 0; }

  // entries
  EntryId create(int64_t user, uint32_t version);
  void detach(EntryId id);
  void erase(EntryId id);
  void pin(EntryId id);
  void unpin(EntryId id);
  void settle(EntryId id);   // an idle entry takes its place in the lists, or leaves
  void unlist(EntryId id);
  void list(EntryId id);

  // begin
  void refuse(std::span<const RowRequest> requests, Batch& batch);
  void enlist(std::span<const RowRequest> requests, Batch& batch);
  struct Match {
    int32_t tokens = 0;
    bool edited = false;
  };
  Match match(const Entry& e, const RowRequest& request, const PageHashes* hashes, int32_t context_tokens,
              uint64_t context_key) const;
  void shorten(EntryId id, int32_t tokens);
  void grant(const RowRequest& request, size_t row_index, bool leads, Batch& batch, std::vector<TransferTask>& onloads);
  bool grow(EntryId id, int32_t pages, Fence& after);
  bool start_onload(EntryId id, int32_t end, bool into_pages, Fence after, std::vector<TransferTask>& onloads);
  Fence finish(Batch& batch);
  bool is_retired(uint32_t version) const;

  // eviction: all or nothing
  bool reclaim_pages(int32_t wanted);
  void evict_from_device(EntryId id, int32_t pages);
  bool allocate_block(int32_t order, Block& block);
  void evict_from_host(EntryId id);
  void free_blocks(Entry& e, int32_t tokens);
  void free_block(Block block);
  EntryId colder(EntryId a, EntryId b) const;
  void count_lost(const Entry& e, int32_t before);

  // offload
  enum class Plan { planned, nothing, no_quota, host_full };
  Plan plan_offload(EntryId id, bool with_tail, std::vector<TransferTask>& offloads);
  bool write_back_coldest(std::vector<TransferTask>& offloads);
  int32_t write_from(const Entry& e, int32_t end) const;
  bool reserve_blocks(const Entry& e, TransferTask& task);
  void publish_blocks(Entry& e, const TransferTask& task);
  void drop_blocks(const Entry& e, const TransferTask& task);
  void write_back_cold(std::vector<TransferTask>& offloads);
  int64_t clean_target() const;

  const IndexConfig config_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Entry[]>> slabs_;
  std::vector<EntryId> free_entries_;
  UserMap map_;
  std::unordered_map<uint32_t, int64_t> versions_;  // entries in the map, per version
  std::unordered_set<uint32_t> retired_;
  PagePool pages_;
  OnloadRegion region_;
  SlotArena slots_;
  std::vector<Block> freed_blocks_;
  LruList<DeviceNodes> clean_, dirty_, kept_;
  LruList<HostNodes> cold_, warm_;
  int64_t clean_pages_ = 0, dirty_pages_ = 0;  // of idle entries; `kept` counts as dirty
  int64_t pending_offload_tokens_ = 0;
  int64_t transfers_ = 0;
  int64_t open_batches_ = 0;
  int32_t recent_need_ = 0;  // pages a batch asked for lately
  uint64_t tick_ = 0;
  uint32_t mark_ = 0;
  Fence fence_ = 0;
  Ticket next_ticket_ = 0;
  Counters counters_;
};

}  // namespace mtserve
