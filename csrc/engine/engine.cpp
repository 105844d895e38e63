#include "engine/engine.h"

#include <stdexcept>

namespace mtserve {

namespace {

std::unique_ptr<Tier> make_arena(const IndexConfig& config, const Geometry& geometry) {
  return std::make_unique<HostArena>(geometry, int64_t{config.num_chunks} * (config.chunk_tokens / config.slot_tokens));
}

}  // namespace

Engine::OpenBatch::~OpenBatch() {
  if (engine != nullptr && batch.open) engine->abort(*this, true);
}

Engine::Engine(const IndexConfig& config, const Geometry& geometry, const DeviceTable& table, std::unique_ptr<Tier> tier)
    : geometry_(geometry),
      index_(config),
      tier_(tier != nullptr ? std::move(tier) : make_arena(config, geometry)),
      mover_(geometry, table, *tier_, config.chunk_tokens),
      onload_worker_(std::make_unique<Worker>()),
      offload_worker_(std::make_unique<Worker>()) {}

Engine::~Engine() { close(); }

void Engine::begin(std::span<const RowRequest> requests, int32_t context_tokens, uint32_t version, OpenBatch& open) {
  std::vector<TransferTask> onloads;
  std::lock_guard lock(mutex_);
  if (closed_) throw std::runtime_error("the cache is closed");
  open.engine = this;
  index_.begin(requests, context_tokens, version, open.batch, onloads);
  start_onloads(std::move(onloads));
  for (const Ticket ticket : open.batch.loads) open.loads.push_back(loads_.at(ticket));
  drop_freed();
}

bool Engine::wait(OpenBatch& open, int32_t layer) {
  bool arrived = true;
  for (const std::shared_ptr<Load>& load : open.loads) arrived &= load->wait(layer);
  return arrived;
}

void Engine::commit(OpenBatch& open) {
  std::vector<TransferTask> offloads;
  std::lock_guard lock(mutex_);
  if (closed_) {
    index_.abort(open.batch, false);
    return;
  }
  index_.commit(open.batch, offloads);
  start_offloads(std::move(offloads));
  drop_freed();
}

void Engine::abort(OpenBatch& open, bool abandoned) {
  std::lock_guard lock(mutex_);
  index_.abort(open.batch, abandoned);
  drop_freed();
}

void Engine::prefetch(std::span<const int64_t> users, uint32_t version) {
  std::vector<TransferTask> onloads;
  std::lock_guard lock(mutex_);
  if (closed_) throw std::runtime_error("the cache is closed");
  index_.prefetch(users, version, onloads);
  start_onloads(std::move(onloads));
  drop_freed();
}

void Engine::evict(std::span<const int64_t> users) {
  std::lock_guard lock(mutex_);
  index_.evict(users);
  drop_freed();
}

void Engine::clear() {
  std::lock_guard lock(mutex_);
  index_.clear();
  drop_freed();
}

// A block is dropped before anybody else can be told to write it.
void Engine::drop_freed() {
  index_.take_freed_blocks(freed_);
  for (const Block& block : freed_) tier_->drop(block);
  freed_.clear();
}

// Layer-major across the batch, so that the first layer of every user is there before the second of any.
void Engine::start_onloads(std::vector<TransferTask> tasks) {
  if (tasks.empty()) return;
  std::vector<std::shared_ptr<Load>> loads;
  for (const TransferTask& task : tasks) loads_[task.ticket] = loads.emplace_back(std::make_shared<Load>());
  in_flight_ += tasks.size();
  onload_worker_->submit([this, tasks = std::move(tasks), loads = std::move(loads)] { run_onloads(tasks, loads); });
}

void Engine::run_onloads(const std::vector<TransferTask>& tasks, const std::vector<std::shared_ptr<Load>>& loads) {
  for (int32_t layer = 0; layer < geometry_.num_layers; ++layer)
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (loads[i]->failed()) continue;
      try {
        mover_.onload_layer(tasks[i], layer);
        loads[i]->layer_arrived();
      } catch (...) {
        loads[i]->fail();
      }
    }
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < tasks.size(); ++i) {
    const bool ok = !loads[i]->failed();
    if (ok) counters_.onload_bytes += (tasks[i].end - tasks[i].first) * geometry_.num_layers * (geometry_.k_row_bytes + geometry_.v_row_bytes);
    index_.onload_done(tasks[i], ok);
    loads_.erase(tasks[i].ticket);
  }
  drop_freed();
  finish_transfers(tasks.size());
}

void Engine::start_offloads(std::vector<TransferTask> tasks) {
  in_flight_ += tasks.size();
  for (TransferTask& task : tasks)
    offload_worker_->submit([this, task = std::move(task)] { run_offload(task); });
}

void Engine::run_offload(const TransferTask& task) {
  bool ok = true;
  try {
    for (const Block& block : task.blocks) tier_->reserve(block);
    for (int32_t layer = 0; layer < geometry_.num_layers; ++layer) mover_.offload_layer(task, layer);
  } catch (...) {
    ok = false;
  }
  std::lock_guard lock(mutex_);
  if (ok) counters_.offload_bytes += (task.end - task.first) * geometry_.num_layers * (geometry_.k_row_bytes + geometry_.v_row_bytes);
  std::vector<TransferTask> next;
  index_.offload_done(task, ok, next);
  drop_freed();
  if (!closed_) start_offloads(std::move(next));
  finish_transfers(1);
}

void Engine::finish_transfers(size_t n) {
  in_flight_ -= n;
  if (in_flight_ == 0) idle_.notify_all();
}

void Engine::drain() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return in_flight_ == 0; });
}

void Engine::flush() {
  for (;;) {
    drain();
    std::lock_guard lock(mutex_);
    if (closed_) return;
    std::vector<TransferTask> offloads;
    index_.plan_flush(offloads);
    if (offloads.empty()) return;
    start_offloads(std::move(offloads));
  }
}

void Engine::close() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  onload_worker_.reset();
  offload_worker_.reset();
}

}  // namespace mtserve
