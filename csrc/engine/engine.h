// One cache of one device: the index decides, the workers copy, the engine keeps the two in step.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "index/index.h"
#include "tiers/device_table.h"
#include "tiers/host_arena.h"
#include "transfer/load.h"
#include "transfer/mover.h"
#include "transfer/worker.h"

namespace mtserve {

struct TransferCounters {
  std::atomic<uint64_t> onload_bytes{0}, offload_bytes{0}, waits_that_blocked{0};
};

class Engine {
 public:
  // A batch between begin and commit or abort. One that is dropped unfinished is aborted.
  struct OpenBatch {
    Engine* engine = nullptr;
    Batch batch;
    std::vector<std::shared_ptr<Load>> loads;
    ~OpenBatch();
  };

  // `tier` is the host storage; null makes it a host arena of the configuration's size.
  Engine(const IndexConfig& config, const Geometry& geometry, const DeviceTable& table, std::unique_ptr<Tier> tier = nullptr);
  ~Engine();

  Index& index() { return index_; }
  Tier& tier() { return *tier_; }

  void begin(std::span<const RowRequest> requests, int32_t context_tokens, uint32_t version, OpenBatch& open);
  // False when the layer's keys and values did not arrive.
  bool wait(OpenBatch& open, int32_t layer);
  void commit(OpenBatch& open);
  void abort(OpenBatch& open, bool abandoned = false);
  void prefetch(std::span<const int64_t> users, uint32_t version);

  void evict(std::span<const int64_t> users);
  void clear();

  // Waits until no transfer is in flight.
  void drain();
  // Persists everything that fits, then waits.
  void flush();
  // Drains and joins; later calls are errors. Safe to call twice.
  void close();

  const TransferCounters& transfer_counters() const { return counters_; }

 private:
  void start_onloads(std::vector<TransferTask> tasks);
  void start_offloads(std::vector<TransferTask> tasks);
  void run_onloads(const std::vector<TransferTask>& tasks, const std::vector<std::shared_ptr<Load>>& loads);
  void run_offload(const TransferTask& task);
  void finish_transfers(size_t n);
  void drop_freed();

  const Geometry geometry_;
  Index index_;
  std::unique_ptr<Tier> tier_;
  Mover mover_;
  TransferCounters counters_;

  // Taken before the index's lock, never inside it: a load is registered and looked up in one step with the decision.
  std::mutex mutex_;
  std::condition_variable idle_;
  std::unordered_map<Ticket, std::shared_ptr<Load>> loads_;
  std::vector<Block> freed_;
  size_t in_flight_ = 0;
  bool closed_ = false;

  std::unique_ptr<Worker> onload_worker_, offload_worker_;
};

}  // namespace mtserve
