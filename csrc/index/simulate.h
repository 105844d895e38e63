// A trace through the index alone: the decisions that a cache makes, without keys, values or a model.
//
// Requests are grouped as a server would: consecutive ones, a batch ending early before a user's second request. What a
// batch loads arrives before it commits. What it writes back arrives `offload_delay` batches later, in order; 0 means
// before the next batch, as when a caller drains the cache after every batch.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "index/index.h"

namespace mtserve {

class Simulation {
 public:
  struct Totals {
    uint64_t committed_before_tokens = 0;  // of the history asked for, what the user's previous request had
    uint64_t index_ns = 0;                 // spent in the index
  };

  Simulation(const IndexConfig& config, int32_t batch_size, int32_t offload_delay);

  // The next `count` requests. An invalidated one is no continuation of its user's history: nothing cached is its prefix.
  // The last ones may wait for the next call, or for `finish`, to fill their batch.
  void run(const int64_t* users, const int64_t* lengths, const bool* invalidated, int64_t count);
  // Serves the batch that is not full and completes all transfers.
  void finish();

  const Index& index() const { return index_; }
  const Totals& totals() const { return totals_; }

 private:
  struct Offload {
    int64_t due;  // batch after which it is done
    TransferTask task;
  };

  struct Previous {
    int32_t tokens = 0;
    uint32_t history = 0;  // which of the histories that began anew
  };

  bool has(int64_t user) const;
  void add(int64_t user, int64_t length, bool invalidated);
  void serve();
  void complete(int64_t until);
  void schedule(std::vector<TransferTask>& tasks);

  Index index_;
  const size_t batch_size_;
  const int64_t offload_delay_;
  std::vector<RowRequest> rows_;
  std::vector<TransferTask> tasks_;
  std::vector<Block> freed_;
  std::deque<Offload> offloads_;
  int64_t batches_ = 0;
  UserMap known_;                   // user to place in previous_
  std::vector<Previous> previous_;  // the latest request of each user
  Totals totals_;
};

}  // namespace mtserve
