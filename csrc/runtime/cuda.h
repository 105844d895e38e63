// The runtime of a CUDA device: non-blocking streams, pinned staging memory, events on the caller's stream.
//
// Written against CudaApi, the calls of the CUDA runtime that are used, so that it compiles and is tested without CUDA:
// tests/native/fake_cuda.h carries them out on simulated streams. Host threads and latches are another runtime's.
//
// An error of CUDA ends nothing: it is kept, with the call and the stream, and from then on `error` tells it. Copies
// that it hit count as failed; events pass, so that nobody hangs.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "runtime/runtime.h"

namespace mtserve {

// Each call returns a CUDA error code, 0 for success.
class CudaApi {
 public:
  static constexpr int kNotReady = 600;  // cudaErrorNotReady

  virtual ~CudaApi() = default;
  virtual int get_device(int* device) = 0;  // of the calling thread
  virtual int set_device(int device) = 0;
  virtual int create_stream(void** stream) = 0;  // not synchronised with the default stream
  virtual int destroy_stream(void* stream) = 0;
  virtual int create_event(void** event) = 0;
  virtual int destroy_event(void* event) = 0;
  virtual int record(void* event, void* stream) = 0;
  virtual int query(void* event) = 0;  // kNotReady while it has not passed
  virtual int synchronize(void* event) = 0;
  virtual int wait(void* stream, void* event) = 0;
  // Copy engine and kernel; the pieces are read before the call returns.
  virtual int copy(const Piece* pieces, size_t count, Route route, void* stream) = 0;
  virtual int copy_by_kernel(const Piece* pieces, size_t count, void* stream) = 0;
  virtual int allocate_pinned(void** memory, int64_t bytes) = 0;
  virtual int free_pinned(void* memory) = 0;
  virtual int allocate_device(void** memory, int64_t bytes, void* stream) = 0;  // in the stream's order
  virtual int free_device(void* memory, void* stream) = 0;
  virtual int pin(void* memory, int64_t bytes) = 0;
  virtual int unpin(void* memory) = 0;
  virtual const char* describe(int error) = 0;
};

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

  // A stream of the caller's, e.g. torch's current one; not owned.
  std::unique_ptr<Stream> wrap_stream(void* stream, const std::string& name);

 private:
  friend class CudaEvent;
  friend class CudaStream;
  friend class CudaHostThread;
  class OnDevice;  // the calling thread's device is this one, until it goes

  // True when the call succeeded; else the first such error is kept.
  bool ok(int code, const char* call, const std::string& where);

  const std::shared_ptr<CudaApi> api_;
  const std::unique_ptr<Runtime> host_;
  const int device_;
  const bool kernel_onloads_;
  std::mutex mutex_;
  std::string error_;
};

}  // namespace mtserve
