// The calls of the CUDA runtime on simulated streams: asynchronous as on a device, in any order that events allow, with
// every access checked. Like CUDA it takes an event that was never recorded for one that has passed.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/cuda.h"
#include "runtime/sim.h"

namespace mtserve {

class FakeCuda : public CudaApi {
 public:
  static constexpr int kIllegalAddress = 700, kInvalidHandle = 400;
  static constexpr int device = 1;  // of all streams: not the one that a fresh thread has

  explicit FakeCuda(SimRuntime& sim) : sim_(sim) {}

  // The n-th copy from now cannot be queued; the n-th wait of the host for an event tells of a failure on the device.
  int64_t fail_copy = 0, fail_synchronize = 0;

  // The device of every thread, as CUDA has it; all threads of the simulation pass one baton.
  int get_device(int* device) override {
    *device = current()[std::this_thread::get_id()];
    return 0;
  }
  int set_device(int device) override {
    current()[std::this_thread::get_id()] = device;
    return 0;
  }
  int create_stream(void** stream) override {
    *stream = sim_.make_stream("cuda").release();
    return 0;
  }
  int destroy_stream(void* stream) override {
    delete at(stream);
    return 0;
  }
  int create_event(void** event) override {
    auto* made = new FakeEvent;
    get_device(&made->device);
    *event = made;
    return 0;
  }
  int destroy_event(void* event) override {
    delete static_cast<FakeEvent*>(event);
    return 0;
  }
  int record(void* event, void* stream) override {
    if (static_cast<FakeEvent*>(event)->device != device) return kInvalidHandle;
    EventPtr& marked = static_cast<FakeEvent*>(event)->marked;
    marked = sim_.make_event();
    at(stream)->record(marked);
    return 0;
  }
  int query(void* event) override {
    const EventPtr& marked = static_cast<FakeEvent*>(event)->marked;
    return marked == nullptr || marked->done() ? 0 : kNotReady;
  }
  int synchronize(void* event) override {
    const EventPtr marked = static_cast<FakeEvent*>(event)->marked;
    if (marked != nullptr) sim_.synchronize(marked);
    return struck(fail_synchronize);
  }
  int wait(void* stream, void* event) override {
    const EventPtr& marked = static_cast<FakeEvent*>(event)->marked;
    if (marked != nullptr) at(stream)->wait(marked);
    return 0;
  }
  int copy(const Piece* pieces, size_t count, Route, void* stream) override { return queue("copy engine", pieces, count, stream); }
  int copy_by_kernel(const Piece* pieces, size_t count, void* stream) override { return queue("copy kernel", pieces, count, stream); }
  int allocate_pinned(void** memory, int64_t bytes) override {
    *memory = new std::byte[static_cast<size_t>(bytes)];
    return 0;
  }
  int free_pinned(void* memory) override {
    delete[] static_cast<std::byte*>(memory);
    return 0;
  }
  int allocate_device(void** memory, int64_t bytes, void*) override {
    *memory = new std::byte[static_cast<size_t>(bytes)];
    return 0;
  }
  int free_device(void* memory, void* stream) override {
    at(stream)->launch("free", [memory] { delete[] static_cast<std::byte*>(memory); }, nullptr);
    return 0;
  }
  int pin(void*, int64_t) override { return 0; }
  int unpin(void*) override { return 0; }
  const char* describe(int error) override { return error == kIllegalAddress ? "an illegal memory access was encountered" : "unknown error"; }

  static Stream* at(void* stream) { return static_cast<Stream*>(stream); }

 private:
  struct FakeEvent {
    int device = 0;
    EventPtr marked;
  };

  std::map<std::thread::id, int>& current() { return current_; }

  static int struck(int64_t& countdown) { return countdown > 0 && --countdown == 0 ? kIllegalAddress : 0; }

  int queue(const char* name, const Piece* pieces, size_t count, void* stream) {
    if (const int error = struck(fail_copy)) return error;
    auto mine = std::make_shared<std::vector<Piece>>(pieces, pieces + count);
    at(stream)->launch(
        name,
        [mine] {
          for (const Piece& piece : *mine) std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
        },
        [&] {
          Accesses out;
          for (const Piece& piece : *mine) {
            out.push_back({piece.from, piece.bytes, false});
            out.push_back({piece.to, piece.bytes, true});
          }
          return out;
        });
    return 0;
  }

  SimRuntime& sim_;
  std::map<std::thread::id, int> current_;
};

// The caller's stream of such a device: events go through the runtime, kernels are queued at once.
class FakeCompute : public Stream {
 public:
  FakeCompute(CudaRuntime& runtime, FakeCuda& cuda) : cuda_(cuda) {
    cuda.create_stream(&handle_);
    wrapped_ = runtime.wrap_stream(handle_, "compute");
  }
  ~FakeCompute() override { cuda_.destroy_stream(handle_); }
  void launch(const char* name, std::function<void()> work, const AccessList& accesses) override {
    FakeCuda::at(handle_)->launch(name, std::move(work), accesses);
  }
  void record(const EventPtr& event) override { wrapped_->record(event); }
  void wait(const EventPtr& event) override { wrapped_->wait(event); }

 private:
  FakeCuda& cuda_;
  void* handle_ = nullptr;
  std::unique_ptr<Stream> wrapped_;
};

}  // namespace mtserve
