#include "index/simulate.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

namespace mtserve {

Simulation::Simulation(const IndexConfig& config, int32_t batch_size, int32_t offload_delay)
    : index_(config), batch_size_(static_cast<size_t>(batch_size)), offload_delay_(offload_delay) {
  if (batch_size < 1 || offload_delay < 0) throw std::invalid_argument("batch_size must be at least 1, offload_delay at least 0");
}

void Simulation::run(const int64_t* users, const int64_t* lengths, const bool* invalidated, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (lengths[i] < 0 || lengths[i] > int64_t{1} << 30)
      throw std::invalid_argument("lengths[" + std::to_string(i) + "] is " + std::to_string(lengths[i]) + "; lengths must be between 0 and 2**30");
    if (rows_.size() == batch_size_ || has(users[i])) serve();
    add(users[i], lengths[i], invalidated[i]);
  }
}

void Simulation::finish() {
  serve();
  complete(INT64_MAX);
}

bool Simulation::has(int64_t user) const {
  return std::any_of(rows_.begin(), rows_.end(), [&](const RowRequest& row) { return row.user == user; });
}

void Simulation::add(int64_t user, int64_t length, bool invalidated) {
  const auto tokens = static_cast<int32_t>(length);
  RowRequest& row = rows_.emplace_back();
  row.user = user;
  row.tokens = tokens;
  EntryId at = known_.find(user, 0);
  if (at == kNoEntry) {
    at = static_cast<EntryId>(previous_.size());
    known_.insert(user, 0, at);
    previous_.emplace_back();
  }
  Previous& previous = previous_[at];
  if (invalidated)
    ++previous.history;
  else
    totals_.committed_before_tokens += std::min(previous.tokens, tokens);
  previous.tokens = tokens;
  row.context_key = previous.history;  // with another key the index takes nothing of what it has for a prefix
}

void Simulation::serve() {
  if (rows_.empty()) return;
  const auto started = std::chrono::steady_clock::now();
  Batch batch;
  tasks_.clear();
  index_.begin(rows_, 0, 0, batch, tasks_);
  std::vector<TransferTask> offloads;
  for (const TransferTask& task : tasks_) index_.onload_done(task, true, offloads);
  schedule(offloads);
  tasks_.clear();
  index_.commit(batch, tasks_);
  schedule(tasks_);
  complete(batches_);
  ++batches_;
  totals_.index_ns += static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - started).count());
  rows_.clear();
}

void Simulation::schedule(std::vector<TransferTask>& tasks) {
  for (TransferTask& task : tasks) offloads_.push_back({batches_ + offload_delay_, std::move(task)});
  tasks.clear();
}

void Simulation::complete(int64_t until) {
  while (!offloads_.empty() && offloads_.front().due <= until) {
    const TransferTask task = std::move(offloads_.front().task);
    offloads_.pop_front();
    tasks_.clear();
    index_.offload_done(task, true, tasks_);
    schedule(tasks_);
  }
  index_.take_freed_blocks(freed_);
  freed_.clear();
}

}  // namespace mtserve
