#include "runtime/cuda.h"

#include <new>
#include <stdexcept>
#include <utility>

#include "runtime/faults.h"

namespace mtserve {

// Streams, events and memory are made on the current device of the calling thread, which is the caller's to choose.
class CudaRuntime::OnDevice {
 public:
  explicit OnDevice(CudaRuntime& runtime) : runtime_(runtime) {
    runtime_.ok(runtime_.api_->get_device(&before_), "cudaGetDevice", "");
    if (before_ != runtime_.device_) runtime_.ok(runtime_.api_->set_device(runtime_.device_), "cudaSetDevice", "device " + std::to_string(runtime_.device_));
  }
  ~OnDevice() {
    if (before_ != runtime_.device_) runtime_.api_->set_device(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  CudaRuntime& runtime_;
  int before_ = 0;
};

class CudaEvent : public Event {
 public:
  explicit CudaEvent(CudaRuntime& runtime) : runtime_(runtime) {
    const CudaRuntime::OnDevice here(runtime);
    if (!runtime.ok(runtime.api_->create_event(&handle_), "cudaEventCreate", "an event")) handle_ = nullptr;
  }
  ~CudaEvent() override {
    if (handle_ != nullptr) runtime_.api_->destroy_event(handle_);
  }

  void reset() override { state_ = State::fresh; }

  bool done() override {
    switch (required()) {
      case State::on_device: {
        const int code = runtime_.api_->query(handle_);
        if (code == CudaApi::kNotReady) return false;
        runtime_.ok(code, "cudaEventQuery", "an event");
        return true;
      }
      case State::on_host:
        return host_->done();
      default:
        return true;
    }
  }

  void record_on_device(void* stream, const std::string& where) {
    const bool good = handle_ != nullptr && runtime_.ok(runtime_.api_->record(handle_, stream), "cudaEventRecord", where);
    state_ = good ? State::on_device : State::broken;
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
        runtime_.ok(runtime_.api_->wait(stream, handle_), "cudaStreamWaitEvent", where);
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
  enum class State { fresh, on_device, on_host, broken };  // broken: its record failed; it counts as passed

  State required() const {
    if (state_ == State::fresh) throw std::logic_error("waiting on an event that was not recorded since its reset");
    return state_;
  }

  CudaRuntime& runtime_;
  void* handle_ = nullptr;
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

  // What was queued runs first: the stream's last event is awaited.
  ~CudaStream() override {
    if (!owned_ || stream_ == nullptr) return;
    const CudaRuntime::OnDevice here(runtime_);
    CudaEvent last(runtime_);
    last.record_on_device(stream_, name_);
    last.wait_here();
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
    const int code = by_kernel ? api.copy_by_kernel(order.pieces.data(), order.pieces.size(), stream_)
                               : api.copy(order.pieces.data(), order.pieces.size(), order.route, stream_);
    if (!runtime_.ok(code, by_kernel ? "copy kernel" : "cudaMemcpyAsync", name_ + ", " + order.name)) *order.failed = true;
  }

  void record(const EventPtr& event) override { as_cuda(event).record_on_device(stream_, name_); }
  void wait(const EventPtr& event) override { as_cuda(event).hold(stream_, name_); }

  void* handle() const { return stream_; }

 protected:
  CudaRuntime& runtime_;
  void* const stream_;
  const std::string name_;
  const bool owned_;
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

CudaRuntime::~CudaRuntime() = default;

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
  if (!ok(api_->allocate_pinned(&memory, bytes), "cudaHostAlloc", std::to_string(bytes) + " bytes")) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), [api = api_](std::byte* at) { api->free_pinned(at); }};
}

std::shared_ptr<std::byte> CudaRuntime::allocate_on_device(int64_t bytes, Stream& stream) {
  const OnDevice here(*this);
  void* const handle = static_cast<CudaStream&>(stream).handle();
  void* memory = nullptr;
  // Not kept as an error: memory may be had again, and the transfer that wanted it is tried again.
  if (api_->allocate_device(&memory, bytes, handle) != 0) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), [api = api_, handle](std::byte* at) { api->free_device(at, handle); }};
}

bool CudaRuntime::ok(int code, const char* call, const std::string& where) {
  if (code == 0) return true;
  std::lock_guard lock(mutex_);
  if (error_.empty()) error_ = std::string(call) + " (" + where + "): " + api_->describe(code);
  return false;
}

std::string CudaRuntime::error() {
  std::lock_guard lock(mutex_);
  return error_;
}

}  // namespace mtserve
