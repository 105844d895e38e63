// CudaApi on the real CUDA runtime.
#include <cuda_runtime_api.h>

#include <atomic>
#include <vector>

#include "cuda/launch.h"
#include "runtime/cuda.h"

namespace mtserve::cuda {
namespace {

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t as_event(void* event) { return static_cast<cudaEvent_t>(event); }

// A failed call leaves its code behind for whoever asks for the last error of this thread, which a launch has to do.
int seen(cudaError_t code) {
  if (code != cudaSuccess) cudaGetLastError();
  return code;
}

class Api : public CudaApi {
 public:
  int get_device(int* device) override { return seen(cudaGetDevice(device)); }
  int set_device(int device) override { return seen(cudaSetDevice(device)); }
  int create_stream(void** stream) override { return seen(cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking)); }
  int destroy_stream(void* stream) override { return seen(cudaStreamDestroy(as_stream(stream))); }
  int create_event(void** event) override { return seen(cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming | cudaEventBlockingSync)); }
  int destroy_event(void* event) override { return seen(cudaEventDestroy(as_event(event))); }
  int record(void* event, void* stream) override { return seen(cudaEventRecord(as_event(event), as_stream(stream))); }
  int query(void* event) override { return seen(cudaEventQuery(as_event(event))); }
  int synchronize(void* event) override { return seen(cudaEventSynchronize(as_event(event))); }
  int wait(void* stream, void* event) override { return seen(cudaStreamWaitEvent(as_stream(stream), as_event(event), 0)); }

  int copy(const Piece* pieces, size_t count, Route route, void* stream) override {
#if CUDART_VERSION >= 13000
    if (count > 1 && batches_) {
      const int code = copy_batch(pieces, count, stream);
      if (code != cudaErrorNotSupported && code != cudaErrorCallRequiresNewerDriver) return code;
      batches_ = false;  // an older driver
    }
#endif
    for (size_t i = 0; i < count; ++i)
      if (const int code = seen(cudaMemcpyAsync(pieces[i].to, pieces[i].from, static_cast<size_t>(pieces[i].bytes), kind(route), as_stream(stream))))
        return code;
    return 0;
  }

  int copy_by_kernel(const Piece* pieces, size_t count, void* stream) override { return copy_pieces(pieces, count, stream); }

  int allocate_pinned(void** memory, int64_t bytes) override { return seen(cudaHostAlloc(memory, static_cast<size_t>(bytes), cudaHostAllocPortable)); }
  int free_pinned(void* memory) override { return seen(cudaFreeHost(memory)); }
  int allocate_device(void** memory, int64_t bytes, void* stream) override { return seen(cudaMallocAsync(memory, static_cast<size_t>(bytes), as_stream(stream))); }
  int free_device(void* memory, void* stream) override { return seen(cudaFreeAsync(memory, as_stream(stream))); }
  int pin(void* memory, int64_t bytes) override { return seen(cudaHostRegister(memory, static_cast<size_t>(bytes), cudaHostRegisterPortable)); }
  int unpin(void* memory) override { return seen(cudaHostUnregister(memory)); }
  const char* describe(int error) override { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

 private:
  static cudaMemcpyKind kind(Route route) {
    return route == Route::to_device ? cudaMemcpyHostToDevice : route == Route::to_host ? cudaMemcpyDeviceToHost : cudaMemcpyDeviceToDevice;
  }

#if CUDART_VERSION >= 13000
  static int copy_batch(const Piece* pieces, size_t count, void* stream) {
    std::vector<void*> to(count);
    std::vector<const void*> from(count);
    std::vector<size_t> bytes(count);
    for (size_t i = 0; i < count; ++i) {
      to[i] = pieces[i].to;
      from[i] = pieces[i].from;
      bytes[i] = static_cast<size_t>(pieces[i].bytes);
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
    return seen(cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), count, &attributes, &first, 1, as_stream(stream)));
  }

  std::atomic<bool> batches_{true};
#endif
};

}  // namespace
}  // namespace mtserve::cuda

// For whoever loads this library without having been linked to it.
extern "C" __attribute__((visibility("default"))) mtserve::CudaApi* mtserve_make_cuda_api() { return new mtserve::cuda::Api; }
