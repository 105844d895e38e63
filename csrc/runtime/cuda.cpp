#include "runtime/cuda.h"

#include <algorithm>
#include <limits>
#include <new>
#include <stdexcept>
#include <utility>

#include "runtime/faults.h"

namespace mtserve {

namespace {

// Events that are kept for later; more than two batches of many layers need.
constexpr size_t kFreeEvents = 1024;

// Errors of a call alone. Whatever is not named here, and all that kernels and copies report late, counts as the end of
// the device: CUDA gives the same error from then on, or nobody knows what was not done.
bool is_survived(int code) {
  switch (code) {
    case CudaApi::kInvalidValue:
    case CudaApi::kOutOfMemory:
    case CudaApi::kInvalidConfiguration:
    case CudaApi::kNewerDriverNeeded:
    case CudaApi::kTooManyLaunches:
    case CudaApi::kNoKernelImage:
    case CudaApi::kOperatingSystem:
    case CudaApi::kInvalidHandle:
    case CudaApi::kOutOfResources:
    case CudaApi::kNotPermitted:
    case CudaApi::kNotSupported:
      return true;
    default:
      // The caller records a graph, which this call does not fit into.
      return code >= CudaApi::kCaptureUnsupported && code <= CudaApi::kCaptureWrongThread;
  }
}

struct NoMemory : std::bad_alloc {
  explicit NoMemory(std::string why) : why_(std::move(why)) {}
  const char* what() const noexcept override { return why_.c_str(); }

 private:
  std::string why_;
};

std::string in_words(CudaApi& api, int code, const char* call, const std::string& where) {
  return std::string(call) + " (" + where + "): " + api.describe(code);
}

// Streams, events and memory are made on the current device of the calling thread, which is the caller's to choose: it
// is the given one until this object goes.
class DeviceGuard {
 public:
  DeviceGuard(CudaApi& api, int device) : api_(api), device_(device) {
    code_ = api_.get_device(&before_);
    if (code_ == 0 && before_ != device_) code_ = api_.set_device(device_);
  }
  ~DeviceGuard() {
    if (before_ != device_) api_.set_device(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  int code() const { return code_; }

 private:
  CudaApi& api_;
  const int device_;
  int before_ = device_;  // where nobody tells, nothing is put back
  int code_ = 0;
};

}  // namespace

void pin_host_memory(CudaApi& api, int device, std::byte* at, int64_t bytes) {
  const DeviceGuard here(api, device);
  if (const int code = here.code()) throw std::runtime_error(in_words(api, code, "cudaSetDevice", "device " + std::to_string(device)));
  if (const int code = api.pin(at, bytes)) throw std::runtime_error(in_words(api, code, "cudaHostRegister", std::to_string(bytes) + " bytes"));
}

class CudaRuntime::OnDevice {
 public:
  explicit OnDevice(CudaRuntime& runtime) : guard_(*runtime.api_, runtime.device_) {
    runtime.ok(guard_.code(), "cudaSetDevice", "device " + std::to_string(runtime.device_));
  }

 private:
  const DeviceGuard guard_;
};

class CudaEvent : public Event {
 public:
  using End = CudaRuntime::End;

  explicit CudaEvent(CudaRuntime& runtime) : runtime_(runtime), handle_(runtime.take_event()) {}
  ~CudaEvent() override {
    if (handle_ != nullptr) runtime_.give_event(handle_);
  }

  void reset() override { state_ = State::fresh; }

  bool done() override {
    switch (required()) {
      case State::on_device: {
        const int code = runtime_.api_->query(handle_);
        return code != CudaApi::kNotReady && runtime_.settle(code, "cudaEventQuery", "an event") != End::refused;
      }
      case State::on_host:
        return host_->done();
      default:
        return true;
    }
  }

  // Where no event can be had or recorded, the moment is awaited instead: it counts as passed because it has.
  void record_on_device(void* stream, const std::string& where) {
    CudaApi& api = *runtime_.api_;
    const End end = handle_ == nullptr ? End::refused : runtime_.settle(api.record(handle_, stream), "cudaEventRecord", where);
    if (end == End::refused) runtime_.ok(api.synchronize_stream(stream), "cudaStreamSynchronize", where);
    state_ = end == End::good ? State::on_device : State::passed;
  }

  void record_on_host(Stream& thread, Runtime& host) {
    host_ = host.make_event();
    thread.record(host_);
    state_ = State::on_host;
  }

  // On the calling host thread.
  void wait_here() {
    switch (required()) {
      case State::on_device:
        runtime_.ok(runtime_.api_->synchronize(handle_), "cudaEventSynchronize", "an event");
        break;
      case State::on_host:
        runtime_.host_->synchronize(host_);
        break;
      default:
        break;
    }
  }

  void hold(void* stream, const std::string& where) {
    switch (required()) {
      case State::on_device:
        if (runtime_.settle(runtime_.api_->wait(stream, handle_), "cudaStreamWaitEvent", where) == End::refused) wait_here();
        break;
      case State::on_host:
        throw std::logic_error("a CUDA stream cannot wait for a host thread");
      default:
        break;
    }
  }

  // The host thread's event, null for one of a stream.
  const EventPtr& on_host() {
    static const EventPtr none;
    return required() == State::on_host ? host_ : none;
  }

 private:
  enum class State { fresh, on_device, on_host, passed };  // passed: there is nothing to wait for, or nothing left to lose

  State required() const {
    if (state_ == State::fresh) throw std::logic_error("waiting on an event that was not recorded since its reset");
    return state_;
  }

  CudaRuntime& runtime_;
  void* const handle_;
  EventPtr host_;
  std::atomic<State> state_{State::fresh};
};

namespace {

CudaEvent& as_cuda(const EventPtr& event) { return static_cast<CudaEvent&>(*event); }

}  // namespace

class CudaStream : public Stream {
 public:
  CudaStream(CudaRuntime& runtime, void* stream, std::string name, bool owned)
      : runtime_(runtime), stream_(stream), name_(std::move(name)), owned_(owned) {}

  // What was queued runs first.
  ~CudaStream() override {
    if (!owned_ || stream_ == nullptr) return;
    const CudaRuntime::OnDevice here(runtime_);
    runtime_.ok(runtime_.api_->synchronize_stream(stream_), "cudaStreamSynchronize", name_);
    if (pool_ != nullptr) runtime_.settle(runtime_.api_->destroy_pool(pool_), "cudaMemPoolDestroy", name_);
    runtime_.ok(runtime_.api_->destroy_stream(stream_), "cudaStreamDestroy", name_);
  }

  void launch(const char* name, std::function<void()>, const AccessList&) override {
    throw std::logic_error(std::string(name) + ": a CUDA stream runs no host function");
  }

  void copy(CopyOrder order) override {
    if (*order.failed || order.pieces.empty()) return;
    try {
      if (order.fault != nullptr) strike(*order.faults, order.faults->*order.fault);
    } catch (...) {
      *order.failed = true;
      return;
    }
    const bool by_kernel = order.route == Route::on_device || (order.route == Route::to_device && runtime_.kernel_onloads_);
    CudaApi& api = *runtime_.api_;
    void* const begin = runtime_.stamp(stream_);
    const int code = by_kernel ? api.copy_by_kernel(order.pieces.data(), order.pieces.size(), stream_)
                               : api.copy(order.pieces.data(), order.pieces.size(), order.route, stream_);
    if (code != 0) {
      runtime_.settle(code, by_kernel ? "copy kernel" : "cudaMemcpyAsync", name_ + ", " + order.name + " of layer " + std::to_string(order.layer));
      *order.failed = true;
    }
    if (begin != nullptr) runtime_.add_timed({name_, order.name, begin, runtime_.stamp(stream_)});
  }

  void record(const EventPtr& event) override { as_cuda(event).record_on_device(stream_, name_); }
  void wait(const EventPtr& event) override { as_cuda(event).hold(stream_, name_); }

  void* handle() const { return stream_; }

  // This stream's own: the device's default pool belongs to others, and gives memory back at every synchronisation. Null
  // where there is none to be had. For the thread that issues the stream's work.
  void* pool() {
    if (!std::exchange(asked_for_pool_, true) &&
        runtime_.settle(runtime_.api_->create_pool(&pool_, runtime_.device_), "cudaMemPoolCreate", name_) != CudaRuntime::End::good)
      pool_ = nullptr;
    return pool_;
  }

 private:
  CudaRuntime& runtime_;
  void* const stream_;
  const std::string name_;
  const bool owned_;
  void* pool_ = nullptr;
  bool asked_for_pool_ = false;
};

// A thread of the host's runtime that may use CUDA.
class CudaHostThread : public Stream {
 public:
  CudaHostThread(CudaRuntime& runtime, std::unique_ptr<Stream> thread, std::string name)
      : runtime_(runtime), name_(std::move(name)), thread_(std::move(thread)) {}

  void launch(const char* name, std::function<void()> work, const AccessList& accesses) override {
    thread_->launch(
        name,
        [this, work = std::move(work)] {
          runtime_.ok(runtime_.api_->set_device(runtime_.device_), "cudaSetDevice", name_);
          work();
        },
        accesses);
  }
  void stay_in_background(bool polled) override { thread_->stay_in_background(polled); }
  void record(const EventPtr& event) override { as_cuda(event).record_on_host(*thread_, *runtime_.host_); }
  void wait(const EventPtr& event) override {
    if (const EventPtr& host = as_cuda(event).on_host(); host != nullptr)
      thread_->wait(host);
    else
      launch("wait for a stream", [event] { as_cuda(event).wait_here(); }, nullptr);
  }

 private:
  CudaRuntime& runtime_;
  const std::string name_;
  const std::unique_ptr<Stream> thread_;  // last: what it still runs uses the name
};

CudaRuntime::CudaRuntime(std::shared_ptr<CudaApi> api, std::unique_ptr<Runtime> host, int device, bool kernel_onloads)
    : api_(std::move(api)), host_(std::move(host)), device_(device), kernel_onloads_(kernel_onloads) {
  const OnDevice here(*this);  // says now what is wrong with it
}

CudaRuntime::~CudaRuntime() {
  destroy_timed(timed_);
  if (base_.event != nullptr) api_->destroy_event(base_.event);
  for (void* event : free_events_) api_->destroy_event(event);
}

std::unique_ptr<Stream> CudaRuntime::make_stream(const std::string& name) {
  const OnDevice here(*this);
  void* stream = nullptr;
  const int code = api_->create_stream(&stream);
  if (!ok(code, "cudaStreamCreate", name)) throw std::runtime_error(error());
  return std::make_unique<CudaStream>(*this, stream, name, true);
}

std::unique_ptr<Stream> CudaRuntime::wrap_stream(void* stream, const std::string& name) {
  return std::make_unique<CudaStream>(*this, stream, name, false);
}

std::unique_ptr<Stream> CudaRuntime::make_host_thread(const std::string& name) {
  return std::make_unique<CudaHostThread>(*this, host_->make_host_thread(name), name);
}

EventPtr CudaRuntime::make_event() { return std::make_shared<CudaEvent>(*this); }
std::unique_ptr<Latch> CudaRuntime::make_latch() { return host_->make_latch(); }
void CudaRuntime::synchronize(const EventPtr& event) { as_cuda(event).wait_here(); }
void CudaRuntime::touch(const char* name, const AccessList& accesses) { host_->touch(name, accesses); }
void CudaRuntime::locked() { host_->locked(); }
void CudaRuntime::unlocking() { host_->unlocking(); }

std::shared_ptr<std::byte> CudaRuntime::allocate_staging(int64_t bytes) {
  const OnDevice here(*this);
  void* memory = nullptr;
  if (const int code = api_->allocate_pinned(&memory, bytes)) throw NoMemory(in_words(*api_, code, "cudaHostAlloc", std::to_string(bytes) + " bytes"));
  return {static_cast<std::byte*>(memory), [api = api_](std::byte* at) { api->free_pinned(at); }};
}

std::shared_ptr<std::byte> CudaRuntime::allocate_on_device(int64_t bytes, Stream& stream) {
  const OnDevice here(*this);
  auto& on = static_cast<CudaStream&>(stream);
  void* const handle = on.handle();
  void* memory = nullptr;
  if (settle(api_->allocate_device(&memory, bytes, on.pool(), handle), "cudaMallocAsync", std::to_string(bytes) + " bytes") != End::good)
    throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), [api = api_, handle](std::byte* at) { api->free_device(at, handle); }};
}

// ---- errors -----------------------------------------------------------------------------------------------------

CudaRuntime::End CudaRuntime::settle(int code, const char* call, const std::string& where) {
  if (code == 0) return End::good;
  const std::string error = in_words(*api_, code, call, where);
  if (!is_survived(code)) {
    keep(error);
    return End::lost;
  }
  std::lock_guard lock(mutex_);
  if (!std::exchange(warned_, true)) warning_ = error;
  return End::refused;
}

bool CudaRuntime::ok(int code, const char* call, const std::string& where) {
  if (code == 0) return true;
  keep(in_words(*api_, code, call, where));
  return false;
}

void CudaRuntime::keep(const std::string& error) {
  std::lock_guard lock(mutex_);
  if (error_.empty()) error_ = error;
}

std::string CudaRuntime::error() {
  std::lock_guard lock(mutex_);
  return error_;
}

std::string CudaRuntime::take_warning() {
  std::lock_guard lock(mutex_);
  return std::exchange(warning_, {});
}

// ---- events -----------------------------------------------------------------------------------------------------

// An event comes back when nobody holds it any more. What still waits for it on a stream waits for the moment that it
// marked when the wait was queued (cudaStreamWaitEvent); a later record does not change that.
void CudaRuntime::give_event(void* event) {
  {
    std::lock_guard lock(events_mutex_);
    if (free_events_.size() < kFreeEvents) {
      free_events_.push_back(event);
      return;
    }
  }
  api_->destroy_event(event);
}

// The one that was given back first, so that what it marked has most likely passed.
void* CudaRuntime::take_event() {
  {
    std::lock_guard lock(events_mutex_);
    if (!free_events_.empty()) {
      void* const event = free_events_.front();
      free_events_.pop_front();
      return event;
    }
  }
  const OnDevice here(*this);
  void* event = nullptr;
  return settle(api_->create_event(&event, false), "cudaEventCreate", "an event") == End::good ? event : nullptr;
}

// ---- timeline ---------------------------------------------------------------------------------------------------

void CudaRuntime::start_timeline(size_t limit) {
  take_timeline();
  const Base base = make_base();
  host_->start_timeline(limit);
  {
    std::lock_guard lock(timed_mutex_);
    timed_limit_ = limit;
    base_ = base;
  }
  timeline.start(limit);
}

// The moment at which the base event passed lies between its record and the end of waiting for it, on a stream that has
// nothing else to do. The narrowest of a few tries counts.
CudaRuntime::Base CudaRuntime::make_base() {
  constexpr int kTries = 3;
  const OnDevice here(*this);
  Base base;
  void* stream = nullptr;
  if (settle(api_->create_stream(&stream), "cudaStreamCreate", "timeline") != End::good) return base;
  int64_t narrowest = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < kTries; ++i) {
    void* event = nullptr;
    if (settle(api_->create_event(&event, true), "cudaEventCreate", "timeline") != End::good) break;
    const int64_t before = Timeline::now();
    const bool good = settle(api_->record(event, stream), "cudaEventRecord", "timeline") == End::good &&
                      settle(api_->synchronize(event), "cudaEventSynchronize", "timeline") == End::good;
    const int64_t width = Timeline::now() - before;
    if (good && width < narrowest) {
      narrowest = width;
      base.ns = before + width / 2;
      std::swap(base.event, event);
    }
    if (event != nullptr) api_->destroy_event(event);
  }
  settle(api_->destroy_stream(stream), "cudaStreamDestroy", "timeline");
  return base;
}

void* CudaRuntime::stamp(void* stream) {
  if (!timeline.is_on()) return nullptr;
  {
    std::lock_guard lock(timed_mutex_);
    if (base_.event == nullptr || timed_.size() >= timed_limit_) return nullptr;
  }
  const OnDevice here(*this);
  void* event = nullptr;
  if (settle(api_->create_event(&event, true), "cudaEventCreate", "timeline") != End::good) return nullptr;
  if (settle(api_->record(event, stream), "cudaEventRecord", "timeline") == End::good) return event;
  api_->destroy_event(event);
  return nullptr;
}

void CudaRuntime::add_timed(Timed timed) {
  {
    std::lock_guard lock(timed_mutex_);
    if (timed.end != nullptr && timeline.is_on() && timed_.size() < timed_limit_) {
      timed_.push_back(std::move(timed));
      return;
    }
  }
  destroy_timed({timed});
}

void CudaRuntime::destroy_timed(const std::vector<Timed>& timed) {
  for (const Timed& piece : timed)
    for (void* event : {piece.begin, piece.end})
      if (event != nullptr) api_->destroy_event(event);
}

// Work that has not ended yet is left out, as on threads.
std::vector<Timeline::Span> CudaRuntime::take_timeline() {
  std::vector<Timeline::Span> out = timeline.take();
  for (Timeline::Span& span : host_->take_timeline()) out.push_back(std::move(span));
  std::vector<Timed> timed;
  Base base;
  size_t limit;
  {
    std::lock_guard lock(timed_mutex_);
    timed.swap(timed_);
    std::swap(base, base_);
    limit = std::exchange(timed_limit_, 0);
  }
  for (const Timed& piece : timed) {
    float since_base = 0, taken = 0;
    if (api_->query(piece.end) != 0 || api_->elapsed(&since_base, base.event, piece.begin) != 0 ||
        api_->elapsed(&taken, piece.begin, piece.end) != 0)
      continue;
    const int64_t begin = base.ns + static_cast<int64_t>(since_base * 1e6);
    out.push_back({piece.stream, piece.name, begin, begin + static_cast<int64_t>(taken * 1e6)});
  }
  destroy_timed(timed);
  if (base.event != nullptr) api_->destroy_event(base.event);
  std::stable_sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  if (out.size() > limit) out.resize(limit);
  return out;
}

}  // namespace mtserve
