#include "engine/engine.h"

#include <unistd.h>

#include <chrono>
#include <stdexcept>

#include "runtime/threads.h"

namespace mtserve {

namespace {

std::unique_ptr<Tier> make_arena(const IndexConfig& config, const Geometry& geometry) {
  return std::make_unique<HostArena>(geometry, int64_t{config.num_chunks} * (config.chunk_tokens / config.slot_tokens));
}

IndexConfig with_region(IndexConfig config, const DeviceTable& table, const EngineOptions& options) {
  const bool staged = options.onload == Strategy::staged;
  config.region_pages = staged ? static_cast<int32_t>(table.num_pages - config.num_pages) : 0;
  config.read_region = staged && options.read_region;
  return config;
}

}  // namespace

class Engine::Decision {
 public:
  explicit Decision(Engine& engine) : engine_(engine), lock_(engine.mutex_) { engine.runtime_->locked(); }
  ~Decision() {
    engine_.drop_freed();
    engine_.runtime_->unlocking();
  }

 private:
  Engine& engine_;
  std::lock_guard<std::mutex> lock_;
};

Engine::OpenBatch::~OpenBatch() {
  if (engine != nullptr && batch.open && engine->is_in_own_process()) engine->abort(*this, true);
}

Engine::Engine(const IndexConfig& config, const Geometry& geometry, const DeviceTable& table, std::unique_ptr<Tier> tier,
               std::unique_ptr<Runtime> runtime, const EngineOptions& options)
    : process_(getpid()),
      index_(with_region(config, table, options)),
      tier_(tier != nullptr ? std::move(tier) : make_arena(config, geometry)),
      runtime_(runtime != nullptr ? std::move(runtime) : std::make_unique<ThreadsRuntime>()),
      caller_(ThreadsRuntime().make_caller_stream()),
      places_{geometry, table, config.chunk_tokens, tier_.get()},
      busy_wait_ms_(options.busy_wait_ms),
      counters_(geometry.num_layers),
      onload_(std::make_unique<OnloadPipeline>(*runtime_, places_, options.onload, options.read_region)),
      offload_(std::make_unique<OffloadPipeline>(*runtime_, places_, options.offload)) {}

Engine::~Engine() { close(); }

bool Engine::is_in_own_process() const { return getpid() == process_; }

void Engine::begin(std::span<const RowRequest> requests, int32_t context_tokens, uint32_t version, OpenBatch& open, Stream* compute) {
  if (busy_wait_ms_ > 0) wait_for_pages(requests, version);
  Orders orders;
  std::vector<EventPtr> uses;
  {
    Decision decision(*this);
    if (closed_) throw std::runtime_error("the cache is closed");
    if (const std::string error = runtime_->error(); !error.empty()) throw std::runtime_error("the device cannot be used any more: " + error);
    open.engine = this;
    open.compute = compute != nullptr ? compute : caller_.get();
    index_.begin(requests, context_tokens, version, open.batch, orders.onloads);
    register_loads(orders);
    for (const Ticket ticket : open.batch.loads) open.loads.push_back(loads_.at(ticket));
    uses = uses_up_to(open.batch.after);
  }
  carry_out(std::move(orders));
  // The batch itself writes pages, and reads what others committed, on its own stream.
  for (const EventPtr& use : uses) open.compute->wait(use);
}

bool Engine::wait(OpenBatch& open, int32_t layer, bool in_pages) {
  using Clock = std::chrono::steady_clock;
  bool good = true;
  const auto started = Clock::now();
  for (size_t i = 0; i < open.loads.size(); ++i) {
    const Load& load = *open.loads[i];
    const bool from_region = !in_pages && open.batch.region_of(open.batch.loads[i]) != nullptr;
    load.issued[layer]->wait();
    open.compute->wait(from_region ? load.landed[layer] : load.ready[layer]);
    good &= !load.failed;
  }
  good &= open.loads.empty() || runtime_->error().empty();
  if (!open.loads.empty() && open.compute->is_inline()) {
    TransferCounters::Layer& counters = counters_.layers[layer];
    ++counters.waits;
    counters.wait_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - started).count();
  }
  return good;
}

bool Engine::arrived(const OpenBatch& open) const {
  for (const LoadPtr& load : open.loads)
    if (load->failed) return false;
  return true;
}

void Engine::commit(OpenBatch& open) { finish(open, true, false); }

void Engine::abort(OpenBatch& open, bool abandoned) { finish(open, false, abandoned); }

void Engine::finish(OpenBatch& open, bool publish, bool abandoned) {
  // Recorded before the pages can become anybody else's.
  EventPtr used;
  if (!open.compute->is_inline()) {
    used = runtime_->make_event();
    open.compute->record(used);
  }
  Orders orders;
  {
    Decision decision(*this);
    // Nothing is published that may have been computed from what never arrived.
    const bool commits = publish && !closed_ && arrived(open) && runtime_->error().empty();
    remember_use(commits ? index_.commit(open.batch, orders.offloads) : index_.abort(open.batch, abandoned), used);
    in_flight_ += orders.offloads.size();
    if (!orders.offloads.empty()) orders.uses = uses_up_to(UINT64_MAX);
  }
  carry_out(std::move(orders));
  pages_may_be_free();
}

void Engine::prefetch(std::span<const int64_t> users, uint32_t version) {
  Orders orders;
  {
    Decision decision(*this);
    if (closed_) throw std::runtime_error("the cache is closed");
    index_.prefetch(users, version, orders.onloads);
    register_loads(orders);
  }
  carry_out(std::move(orders));
}

void Engine::evict(std::span<const int64_t> users) {
  Decision decision(*this);
  index_.evict(users);
}

void Engine::clear() {
  Decision decision(*this);
  index_.clear();
}

// ---- orders -----------------------------------------------------------------------------------------------------

void Engine::register_loads(Orders& orders) {
  Fence after = 0;
  for (const TransferTask& task : orders.onloads) {
    const bool scattered = task.region >= 0 && !task.pages.empty();
    loads_[task.ticket] = orders.loads.emplace_back(std::make_shared<Load>(*runtime_, places_.geometry.num_layers, scattered));
    after = std::max(after, task.after);
  }
  in_flight_ += orders.onloads.size();
  orders.uses = uses_up_to(after);
}

void Engine::carry_out(Orders orders) {
  if (!orders.onloads.empty())
    onload_->start({std::move(orders.onloads), std::move(orders.loads), orders.uses},
                   [this](const OnloadPipeline::Group& group) { onloads_done(group); });
  for (TransferTask& task : orders.offloads)
    offload_->start(std::move(task), orders.uses, [this](const TransferTask& gathered) { offload_gathered(gathered); },
                    [this](const TransferTask& done, bool ok) { offload_done(done, ok); });
}

void Engine::onloads_done(const OnloadPipeline::Group& group) {
  Orders orders;
  std::vector<std::shared_ptr<Latch>> drained;
  {
    Decision decision(*this);
    for (size_t i = 0; i < group.tasks.size(); ++i) {
      const bool ok = !group.loads[i]->failed && runtime_->error().empty();
      if (ok) counters_.onload_bytes += task_bytes(places_, group.tasks[i]);
      index_.onload_done(group.tasks[i], ok, orders.offloads);
      loads_.erase(group.tasks[i].ticket);
    }
    in_flight_ += orders.offloads.size();
    in_flight_ -= group.tasks.size();
    if (!orders.offloads.empty()) orders.uses = uses_up_to(UINT64_MAX);
    if (in_flight_ == 0) drained.swap(drainers_);
  }
  carry_out(std::move(orders));
  for (const auto& latch : drained) latch->set();
  pages_may_be_free();
}

void Engine::offload_gathered(const TransferTask& task) {
  {
    Decision decision(*this);
    index_.offload_gathered(task);
  }
  pages_may_be_free();
}

void Engine::offload_done(const TransferTask& task, bool ok) {
  Orders orders;
  std::vector<std::shared_ptr<Latch>> drained;
  {
    Decision decision(*this);
    ok &= runtime_->error().empty();
    if (ok) counters_.offload_bytes += task_bytes(places_, task);
    index_.offload_done(task, ok, orders.offloads);
    in_flight_ += orders.offloads.size();
    orders.uses = uses_up_to(UINT64_MAX);
    if (--in_flight_ == 0) drained.swap(drainers_);
  }
  carry_out(std::move(orders));
  for (const auto& latch : drained) latch->set();
  pages_may_be_free();
}

// ---- uses -------------------------------------------------------------------------------------------------------

void Engine::remember_use(Fence fence, const EventPtr& event) {
  if (event != nullptr) uses_.emplace_back(fence, event);
}

// The uses recorded up to a moment that may not have passed yet.
std::vector<EventPtr> Engine::uses_up_to(Fence fence) {
  while (!uses_.empty() && uses_.front().second->done()) uses_.pop_front();
  std::vector<EventPtr> out;
  for (const auto& [moment, event] : uses_)
    if (moment <= fence) out.push_back(event);
  return out;
}

// ---- busy pages -------------------------------------------------------------------------------------------------

void Engine::wait_for_pages(std::span<const RowRequest> requests, uint32_t version) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(busy_wait_ms_);
  std::unique_lock lock(mutex_);
  while (index_.is_short_of_pages(requests, version)) {
    const uint64_t seen = releases_;
    if (!less_busy_.wait_until(lock, deadline, [&] { return releases_ != seen; })) return;
  }
}

void Engine::pages_may_be_free() {
  if (busy_wait_ms_ == 0) return;
  {
    std::lock_guard lock(mutex_);
    ++releases_;
  }
  less_busy_.notify_all();
}

// A block is dropped before anybody else can be told to write it.
void Engine::drop_freed() {
  index_.take_freed_blocks(freed_);
  for (const Block& block : freed_) tier_->drop(block);
  freed_.clear();
}

// ---- life -------------------------------------------------------------------------------------------------------

void Engine::drain() {
  const std::shared_ptr<Latch> latch = runtime_->make_latch();
  {
    Decision decision(*this);
    if (in_flight_ == 0) return;
    drainers_.push_back(latch);
  }
  latch->wait();
}

void Engine::flush() {
  for (;;) {
    drain();
    Orders orders;
    {
      Decision decision(*this);
      if (closed_) return;
      index_.plan_flush(orders.offloads);
      if (orders.offloads.empty()) return;
      in_flight_ += orders.offloads.size();
      orders.uses = uses_up_to(UINT64_MAX);
    }
    carry_out(std::move(orders));
  }
}

void Engine::close() {
  {
    Decision decision(*this);
    if (closed_ && onload_ == nullptr) return;
    closed_ = true;
  }
  drain();
  onload_.reset();
  offload_.reset();
  tier_->close();
}

}  // namespace mtserve
