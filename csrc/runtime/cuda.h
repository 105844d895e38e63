// The runtime of a CUDA device: non-blocking streams, pinned staging memory, events on the caller's stream.
//
// Written against CudaApi, the calls of the CUDA runtime that are used, so that it compiles and is tested without CUDA:
// tests/native/fake_cuda.h carries them out on simulated streams. Host threads and latches are another runtime's.
//
// An error of CUDA ends nothing. One that leaves the device usable (no memory, a call that was refused) fails the copy
// that it hit and no more; `take_warning` tells of it. Any other one is kept, with the call and the stream, and from then
// on `error` tells it: copies that it hit count as failed, events pass, so that nobody hangs.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/runtime.h"

namespace mtserve {

// Each call returns a CUDA error code, 0 for success.
class CudaApi {
 public:
  // Codes of cudaError_t that are told apart; csrc/cuda/api.cpp compares them with CUDA's own.
  static constexpr int kInvalidValue = 1, kOutOfMemory = 2, kInvalidConfiguration = 9, kNewerDriverNeeded = 36, kTooManyLaunches = 69,
                       kNoKernelImage = 209, kOperatingSystem = 304, kInvalidHandle = 400, kNotReady = 600, kOutOfResources = 701,
                       kNotPermitted = 800, kNotSupported = 801, kCaptureUnsupported = 900, kCaptureWrongThread = 908;

  virtual ~CudaApi() = default;
  virtual int get_device(int* device) = 0;  // of the calling thread
  virtual int set_device(int device) = 0;
  virtual int create_stream(void** stream) = 0;  // not synchronised with the default stream
  virtual int destroy_stream(void* stream) = 0;
  virtual int synchronize_stream(void* stream) = 0;
  virtual int create_event(void** event, bool timed) = 0;
  virtual int destroy_event(void* event) = 0;
  virtual int record(void* event, void* stream) = 0;
  virtual int query(void* event) = 0;  // kNotReady while it has not passed
  virtual int synchronize(void* event) = 0;
  virtual int wait(void* stream, void* event) = 0;
  virtual int elapsed(float* milliseconds, void* from, void* to) = 0;  // of timed events that have passed
  // Copy engine and kernel; the pieces are read before the call returns.
  virtual int copy(const Piece* pieces, size_t count, Route route, void* stream) = 0;
  virtual int copy_by_kernel(const Piece* pieces, size_t count, void* stream) = 0;
  virtual int allocate_pinned(void** memory, int64_t bytes) = 0;
  virtual int free_pinned(void* memory) = 0;
  // A pool of device memory that keeps what is given back to it, until it is destroyed.
  virtual int create_pool(void** pool, int device) = 0;
  virtual int destroy_pool(void* pool) = 0;
  virtual int allocate_device(void** memory, int64_t bytes, void* pool, void* stream) = 0;  // in the stream's order
  virtual int free_device(void* memory, void* stream) = 0;
  virtual int pin(void* memory, int64_t bytes) = 0;
  virtual int unpin(void* memory) = 0;
  virtual const char* describe(int error) = 0;
};

// Pins host memory for the copy engines of a device, whatever device the calling thread has. Throws std::runtime_error
// with the call.
void pin_host_memory(CudaApi& api, int device, std::byte* at, int64_t bytes);

class CudaRuntime : public Runtime {
 public:
  // `host` makes host threads and latches. `kernel_onloads`: a kernel reads pinned host memory instead of a copy engine.
  CudaRuntime(std::shared_ptr<CudaApi> api, std::unique_ptr<Runtime> host, int device, bool kernel_onloads = false);
  ~CudaRuntime() override;

  std::unique_ptr<Stream> make_stream(const std::string& name) override;
  std::unique_ptr<Stream> make_host_thread(const std::string& name) override;
  EventPtr make_event() override;
  std::unique_ptr<Latch> make_latch() override;
  void synchronize(const EventPtr& event) override;
  void touch(const char* name, const AccessList& accesses) override;
  void locked() override;
  void unlocking() override;
  std::shared_ptr<std::byte> allocate_staging(int64_t bytes) override;
  std::shared_ptr<std::byte> allocate_on_device(int64_t bytes, Stream& stream) override;
  std::string error() override;
  void start_timeline(size_t limit) override;
  std::vector<Timeline::Span> take_timeline() override;

  // The first error that the device survived, with the call, once; empty before and afterwards.
  std::string take_warning();

  // A stream of the caller's, e.g. torch's current one; not owned.
  std::unique_ptr<Stream> wrap_stream(void* stream, const std::string& name);

 private:
  friend class CudaEvent;
  friend class CudaStream;
  friend class CudaHostThread;
  class OnDevice;  // the calling thread's device is this one, until it goes

  // A piece of a stream's work between two timed events.
  struct Timed {
    std::string stream;
    const char* name = "";  // a literal
    void* begin = nullptr;
    void* end = nullptr;
  };

  // How a call ended: well; refused, which the device survives and `take_warning` tells; or with an error that is kept.
  enum class End { good, refused, lost };
  End settle(int code, const char* call, const std::string& where);
  // True when the call succeeded; any error of it is kept, for nobody can make up for what the call was to do.
  bool ok(int code, const char* call, const std::string& where);
  void keep(const std::string& error);

  // Events are made once and handed on.
  void* take_event();  // null when there is none to be had
  void give_event(void* event);

  // A timed event, recorded on the stream now; null unless the timeline is on and has room.
  void* stamp(void* stream);
  void add_timed(Timed timed);
  void destroy_timed(const std::vector<Timed>& timed);

  const std::shared_ptr<CudaApi> api_;
  const std::unique_ptr<Runtime> host_;
  const int device_;
  const bool kernel_onloads_;
  std::mutex mutex_;
  std::string error_, warning_;
  bool warned_ = false;

  std::mutex events_mutex_;
  std::deque<void*> free_events_;

  // A timed event, null for none, and when it passed: nanoseconds of the steady clock.
  struct Base {
    void* event = nullptr;
    int64_t ns = 0;
  };
  Base make_base();

  std::mutex timed_mutex_;
  std::vector<Timed> timed_;
  size_t timed_limit_ = 0;
  Base base_;
};

}  // namespace mtserve
