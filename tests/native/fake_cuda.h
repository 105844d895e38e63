// The calls of the CUDA runtime on simulated streams: asynchronous as on a device, in any order that events allow, with
// every access checked. Like CUDA it takes an event that was never recorded for one that has passed.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/cuda.h"
#include "runtime/sim.h"

namespace mtserve {

class FakeCuda : public CudaApi {
 public:
  static constexpr int kIllegalAddress = 700, kPeerAccess = 217;
  static constexpr int device = 1;  // of all streams, unless told otherwise: not the one that a fresh thread has
  static constexpr int64_t kClockAhead = int64_t{1} << 50;  // of the device's clock, nanoseconds

  explicit FakeCuda(SimRuntime& sim) : sim_(sim) {}

  // The n-th such call from now fails with that code.
  struct Fault {
    int64_t countdown = 0;
    int code = kIllegalAddress;
  };
  // A copy that cannot be queued; a wait of the host that tells of a failure on the device; ...
  Fault copy_fault, synchronize_fault, query_fault, create_event_fault, record_fault, wait_fault, allocate_fault, pool_fault, pin_fault;

  // What was made so far, and what of it is left.
  int64_t events_made = 0, events_left = 0, timed_left = 0, streams_left = 0, pools_made = 0;
  std::set<void*> pools;
  std::map<const std::byte*, int64_t> pinned;  // bytes
  std::vector<int> pinned_from;                // the device of each call
  // Memory of a device; copies on another device's streams may not touch it.
  void own(int device, const std::byte* begin, int64_t bytes) { owned_.push_back({device, begin, bytes}); }

  // The device of every thread, as CUDA has it; all threads of the simulation pass one baton.
  int get_device(int* device) override {
    *device = current_[std::this_thread::get_id()];
    return 0;
  }
  int set_device(int device) override {
    current_[std::this_thread::get_id()] = device;
    return 0;
  }
  int create_stream(void** stream) override {
    auto* made = new FakeStream{0, sim_.make_stream("cuda")};
    get_device(&made->device);
    ++streams_left;
    *stream = made;
    return 0;
  }
  int destroy_stream(void* stream) override {
    --streams_left;
    delete static_cast<FakeStream*>(stream);
    return 0;
  }
  int synchronize_stream(void* stream) override {
    const EventPtr last = sim_.make_event();
    at(stream)->record(last);
    sim_.synchronize(last);
    return 0;
  }
  int create_event(void** event, bool timed) override {
    if (const int error = struck(create_event_fault)) return error;
    auto* made = new FakeEvent;
    get_device(&made->device);
    if (timed) made->passed = std::make_shared<int64_t>(0);
    (timed ? timed_left : events_left) += 1;
    events_made += !timed;
    *event = made;
    return 0;
  }
  int destroy_event(void* event) override {
    auto* gone = static_cast<FakeEvent*>(event);
    (gone->passed != nullptr ? timed_left : events_left) -= 1;
    delete gone;
    return 0;
  }
  int record(void* event, void* stream) override {
    if (const int error = struck(record_fault)) return error;
    auto* recorded = static_cast<FakeEvent*>(event);
    if (recorded->device != static_cast<FakeStream*>(stream)->device) return kInvalidHandle;
    if (recorded->passed != nullptr)
      at(stream)->launch("time", [passed = recorded->passed] { *passed = Timeline::now() + kClockAhead; }, nullptr);
    recorded->marked = sim_.make_event();
    at(stream)->record(recorded->marked);
    return 0;
  }
  int query(void* event) override {
    if (const int error = struck(query_fault)) return error;
    const EventPtr& marked = static_cast<FakeEvent*>(event)->marked;
    return marked == nullptr || marked->done() ? 0 : kNotReady;
  }
  int synchronize(void* event) override {
    const EventPtr marked = static_cast<FakeEvent*>(event)->marked;
    if (marked != nullptr) sim_.synchronize(marked);
    return struck(synchronize_fault);
  }
  int wait(void* stream, void* event) override {
    if (const int error = struck(wait_fault)) return error;
    const EventPtr& marked = static_cast<FakeEvent*>(event)->marked;
    if (marked != nullptr) at(stream)->wait(marked);
    return 0;
  }
  int elapsed(float* milliseconds, void* from, void* to) override {
    const auto *a = static_cast<FakeEvent*>(from), *b = static_cast<FakeEvent*>(to);
    if (a->passed == nullptr || b->passed == nullptr) return kInvalidHandle;
    if (*a->passed == 0 || *b->passed == 0) return kNotReady;
    *milliseconds = static_cast<float>(static_cast<double>(*b->passed - *a->passed) * 1e-6);
    return 0;
  }
  int copy(const Piece* pieces, size_t count, Route, void* stream) override { return queue("copy engine", pieces, count, stream); }
  int copy_by_kernel(const Piece* pieces, size_t count, void* stream) override {
    int here = 0;
    get_device(&here);
    return here == static_cast<FakeStream*>(stream)->device ? queue("copy kernel", pieces, count, stream) : kInvalidHandle;
  }
  int allocate_pinned(void** memory, int64_t bytes) override {
    *memory = new std::byte[static_cast<size_t>(bytes)];
    return 0;
  }
  int free_pinned(void* memory) override {
    delete[] static_cast<std::byte*>(memory);
    return 0;
  }
  int create_pool(void** pool, int device) override {
    if (const int error = struck(pool_fault)) return error;
    ++pools_made;
    *pool = new int(device);
    pools.insert(*pool);
    return 0;
  }
  int destroy_pool(void* pool) override {
    pools.erase(pool);
    delete static_cast<int*>(pool);
    return 0;
  }
  int allocate_device(void** memory, int64_t bytes, void* pool, void* stream) override {
    if (const int error = struck(allocate_fault)) return error;
    if (pool != nullptr && (!pools.contains(pool) || *static_cast<int*>(pool) != static_cast<FakeStream*>(stream)->device)) return kInvalidValue;
    *memory = new std::byte[static_cast<size_t>(bytes)];
    return 0;
  }
  int free_device(void* memory, void* stream) override {
    at(stream)->launch("free", [memory] { delete[] static_cast<std::byte*>(memory); }, nullptr);
    return 0;
  }
  int pin(void* memory, int64_t bytes) override {
    if (const int error = struck(pin_fault)) return error;
    int here = 0;
    get_device(&here);
    pinned_from.push_back(here);
    pinned[static_cast<std::byte*>(memory)] = bytes;
    return 0;
  }
  int unpin(void* memory) override { return pinned.erase(static_cast<std::byte*>(memory)) == 1 ? 0 : kInvalidValue; }
  const char* describe(int error) override {
    return error == kIllegalAddress ? "an illegal memory access was encountered" : error == kOutOfMemory ? "out of memory" : "unknown error";
  }

  static Stream* at(void* stream) { return static_cast<FakeStream*>(stream)->stream.get(); }

 private:
  struct FakeStream {
    int device = 0;
    std::unique_ptr<Stream> stream;
  };
  struct FakeEvent {
    int device = 0;
    EventPtr marked;
    std::shared_ptr<int64_t> passed;  // when, of a timed one; 0 while it has not
  };
  struct Owned {
    int device;
    const std::byte* begin;
    int64_t bytes;
  };

  static int struck(Fault& fault) { return fault.countdown > 0 && --fault.countdown == 0 ? fault.code : 0; }

  bool is_foreign(int device, const std::byte* at) const {
    return std::any_of(owned_.begin(), owned_.end(), [&](const Owned& o) { return o.device != device && at >= o.begin && at < o.begin + o.bytes; });
  }

  int queue(const char* name, const Piece* pieces, size_t count, void* stream) {
    if (const int error = struck(copy_fault)) return error;
    const int device = static_cast<FakeStream*>(stream)->device;
    auto mine = std::make_shared<std::vector<Piece>>(pieces, pieces + count);
    for (const Piece& piece : *mine)
      if (is_foreign(device, piece.from) || is_foreign(device, piece.to)) return kPeerAccess;
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
  std::vector<Owned> owned_;
};

// The caller's stream of such a device: events go through the runtime, kernels are queued at once.
class FakeCompute : public Stream {
 public:
  FakeCompute(CudaRuntime& runtime, FakeCuda& cuda, int device = FakeCuda::device) : cuda_(cuda) {
    int before = 0;
    cuda.get_device(&before);
    cuda.set_device(device);
    cuda.create_stream(&handle_);
    cuda.set_device(before);
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
