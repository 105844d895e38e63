// One cache of one device: the index decides, the pipelines copy, the engine keeps the two in step.
//
// Time: a batch's pins end in host time, with commit or abort. From then on events protect: each commit and abort
// records one on the caller's stream (unless that stream runs inline), and whoever is about to write a page waits for
// those recorded before the page was freed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "index/index.h"
#include "runtime/runtime.h"
#include "tiers/device_table.h"
#include "tiers/host_arena.h"
#include "transfer/load.h"
#include "transfer/offload.h"
#include "transfer/onload.h"

namespace mtserve {

struct EngineOptions {
  Strategy onload = Strategy::direct;
  Strategy offload = Strategy::direct;
  int32_t busy_wait_ms = 0;  // how long begin may wait for pages that are busy
  bool read_region = false;  // staged onloads are read where they land
};

struct TransferCounters {
  explicit TransferCounters(int32_t num_layers) : layers(static_cast<size_t>(num_layers)) {}

  std::atomic<uint64_t> onload_bytes{0}, offload_bytes{0};
  struct Layer {
    std::atomic<uint64_t> waits{0}, wait_ns{0};  // that found the layer's copies unfinished, and for how long
  };
  std::vector<Layer> layers;
};

class Engine {
 public:
  // A batch between begin and commit or abort. One that is dropped unfinished is aborted.
  struct OpenBatch {
    Engine* engine = nullptr;
    Batch batch;
    std::vector<LoadPtr> loads;  // one per ticket in `batch.loads`
    Stream* compute = nullptr;
    ~OpenBatch();
  };

  // `runtime` null: threads, with the caller's thread as compute. `tier` null: a host arena of the configured size.
  // Pages of the table behind `config.num_pages` are the onload region.
  Engine(const IndexConfig& config, const Geometry& geometry, const DeviceTable& table, std::unique_ptr<Tier> tier = nullptr,
         std::unique_ptr<Runtime> runtime = nullptr, const EngineOptions& options = {});
  ~Engine();

  // False after a fork, in the child: its threads do not exist there and its locks may be held for ever.
  bool is_in_own_process() const;

  Index& index() { return index_; }
  Tier& tier() { return *tier_; }
  Runtime& runtime() { return *runtime_; }

  // `compute` is the caller's stream, null for the caller's own thread. Never waits for a copy; waits for busy pages
  // only within `busy_wait_ms`.
  void begin(std::span<const RowRequest> requests, int32_t context_tokens, uint32_t version, OpenBatch& open, Stream* compute = nullptr);
  // Blocks the host until the layer's copies are issued, then holds the batch's stream until they are done: those into
  // the onload region where the batch reads there, unless `in_pages`. False when they are known to have failed; on
  // streams that do not run inline, `arrived` tells in the end.
  bool wait(OpenBatch& open, int32_t layer, bool in_pages = false);
  bool arrived(const OpenBatch& open) const;
  void commit(OpenBatch& open);
  void abort(OpenBatch& open, bool abandoned = false);
  void prefetch(std::span<const int64_t> users, uint32_t version);
  void evict(std::span<const int64_t> users);
  void clear();

  // Waits until no transfer is in flight.
  void drain();
  // Persists everything that fits, then waits.
  void flush();
  // Drains and joins; a later begin is an error. Safe to call twice.
  void close();

  const TransferCounters& transfer_counters() const { return counters_; }

 private:
  // Decisions are taken under one lock; nothing is launched or waited for inside.
  class Decision;
  // What a decision wants carried out.
  struct Orders {
    std::vector<TransferTask> onloads, offloads;
    std::vector<LoadPtr> loads;  // one per onload
    std::vector<EventPtr> uses;
  };

  void register_loads(Orders& orders);
  void carry_out(Orders orders);
  std::vector<EventPtr> uses_up_to(Fence fence);
  void remember_use(Fence fence, const EventPtr& event);
  void finish(OpenBatch& open, bool publish, bool abandoned);
  void onloads_done(const OnloadPipeline::Group& group);
  void offload_gathered(const TransferTask& task);
  void offload_done(const TransferTask& task, bool ok);
  void drop_freed();
  void wait_for_pages(std::span<const RowRequest> requests, uint32_t version);
  void pages_may_be_free();

  const int process_;
  Index index_;
  std::unique_ptr<Tier> tier_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<Stream> caller_;
  const Places places_;
  const int32_t busy_wait_ms_;
  TransferCounters counters_;

  std::mutex mutex_;
  std::unordered_map<Ticket, LoadPtr> loads_;
  std::deque<std::pair<Fence, EventPtr>> uses_;  // recorded, perhaps not passed
  std::vector<Block> freed_;
  std::vector<std::shared_ptr<Latch>> drainers_;
  size_t in_flight_ = 0;
  bool closed_ = false;
  std::condition_variable less_busy_;
  uint64_t releases_ = 0;  // moments at which pages may have become free

  std::unique_ptr<OnloadPipeline> onload_;
  std::unique_ptr<OffloadPipeline> offload_;
};

}  // namespace mtserve
