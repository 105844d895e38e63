// CudaApi on the real CUDA runtime.
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "cuda/launch.h"
#include "runtime/cuda.h"

namespace mtserve::cuda {
namespace {

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t as_event(void* event) { return static_cast<cudaEvent_t>(event); }
cudaMemPool_t as_pool(void* pool) { return static_cast<cudaMemPool_t>(pool); }

static_assert(CudaApi::kInvalidValue == cudaErrorInvalidValue && CudaApi::kOutOfMemory == cudaErrorMemoryAllocation &&
              CudaApi::kInvalidConfiguration == cudaErrorInvalidConfiguration && CudaApi::kNewerDriverNeeded == cudaErrorCallRequiresNewerDriver &&
              CudaApi::kTooManyLaunches == cudaErrorLaunchPendingCountExceeded && CudaApi::kNoKernelImage == cudaErrorNoKernelImageForDevice &&
              CudaApi::kOperatingSystem == cudaErrorOperatingSystem && CudaApi::kInvalidHandle == cudaErrorInvalidResourceHandle &&
              CudaApi::kNotReady == cudaErrorNotReady && CudaApi::kOutOfResources == cudaErrorLaunchOutOfResources &&
              CudaApi::kNotPermitted == cudaErrorNotPermitted && CudaApi::kNotSupported == cudaErrorNotSupported &&
              CudaApi::kCaptureUnsupported == cudaErrorStreamCaptureUnsupported &&
              CudaApi::kCaptureWrongThread == cudaErrorStreamCaptureWrongThread);

// A failed call leaves its code behind for whoever asks for the last error of this thread, which a launch has to do.
int seen(cudaError_t code) {
  if (code != cudaSuccess) cudaGetLastError();
  return code;
}

// While one of these lives, calls of this thread neither fail because another thread captures a graph nor break its
// capture: they touch nothing that is being captured. For all calls that the documentation of captures calls unsafe.
class BesideCaptures {
 public:
  BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

template <class Call>
int beside_captures(const Call& call) {
  const BesideCaptures relaxed;
  return seen(call());
}

class Api : public CudaApi {
 public:
  int get_device(int* device) override { return seen(cudaGetDevice(device)); }
  int set_device(int device) override { return seen(cudaSetDevice(device)); }
  int create_stream(void** stream) override { return seen(cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking)); }
  int destroy_stream(void* stream) override { return seen(cudaStreamDestroy(as_stream(stream))); }
  int synchronize_stream(void* stream) override {
    return beside_captures([&] { return cudaStreamSynchronize(as_stream(stream)); });
  }
  int create_event(void** event, bool timed) override {
    return seen(cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventBlockingSync | (timed ? cudaEventDefault : cudaEventDisableTiming)));
  }
  int destroy_event(void* event) override { return seen(cudaEventDestroy(as_event(event))); }
  int record(void* event, void* stream) override { return seen(cudaEventRecord(as_event(event), as_stream(stream))); }
  int query(void* event) override {
    return beside_captures([&] { return cudaEventQuery(as_event(event)); });
  }
  int synchronize(void* event) override {
    return beside_captures([&] { return cudaEventSynchronize(as_event(event)); });
  }
  int wait(void* stream, void* event) override { return seen(cudaStreamWaitEvent(as_stream(stream), as_event(event), 0)); }
  int elapsed(float* milliseconds, void* from, void* to) override { return seen(cudaEventElapsedTime(milliseconds, as_event(from), as_event(to))); }

  int copy(const Piece* pieces, size_t count, Route route, void* stream) override {
#if CUDART_VERSION >= 12080
    if (count > 1 && batches_) {
      const int code = copy_batch(pieces, count, stream);
      if (code != cudaErrorNotSupported && code != cudaErrorCallRequiresNewerDriver && code != cudaErrorSymbolNotFound) return code;
      batches_ = false;  // an older driver
    }
#endif
    for (size_t i = 0; i < count; ++i)
      if (const int code = seen(cudaMemcpyAsync(pieces[i].to, pieces[i].from, static_cast<size_t>(pieces[i].bytes), kind(route), as_stream(stream))))
        return code;
    return 0;
  }

  int copy_by_kernel(const Piece* pieces, size_t count, void* stream) override { return copy_pieces(pieces, count, stream); }

  int allocate_pinned(void** memory, int64_t bytes) override {
    return beside_captures([&] { return cudaHostAlloc(memory, static_cast<size_t>(bytes), cudaHostAllocPortable); });
  }
  int free_pinned(void* memory) override {
    return beside_captures([&] { return cudaFreeHost(memory); });
  }

  int create_pool(void** pool, int device) override {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device;
    cudaMemPool_t made = nullptr;
    if (const int code = seen(cudaMemPoolCreate(&made, &properties))) return code;
    uint64_t keep = UINT64_MAX;
    if (const int code = seen(cudaMemPoolSetAttribute(made, cudaMemPoolAttrReleaseThreshold, &keep))) {
      destroy_pool(made);
      return code;
    }
    *pool = made;
    return 0;
  }
  int destroy_pool(void* pool) override { return seen(cudaMemPoolDestroy(as_pool(pool))); }
  int allocate_device(void** memory, int64_t bytes, void* pool, void* stream) override {
    return beside_captures([&] {
      return pool != nullptr ? cudaMallocFromPoolAsync(memory, static_cast<size_t>(bytes), as_pool(pool), as_stream(stream))
                             : cudaMallocAsync(memory, static_cast<size_t>(bytes), as_stream(stream));
    });
  }
  int free_device(void* memory, void* stream) override { return seen(cudaFreeAsync(memory, as_stream(stream))); }
  int pin(void* memory, int64_t bytes) override {
    return beside_captures([&] { return cudaHostRegister(memory, static_cast<size_t>(bytes), cudaHostRegisterPortable); });
  }
  int unpin(void* memory) override {
    return beside_captures([&] { return cudaHostUnregister(memory); });
  }
  const char* describe(int error) override { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

 private:
  static cudaMemcpyKind kind(Route route) {
    return route == Route::to_device ? cudaMemcpyHostToDevice : route == Route::to_host ? cudaMemcpyDeviceToHost : cudaMemcpyDeviceToDevice;
  }

#if CUDART_VERSION >= 12080
  static int copy_batch(const Piece* pieces, size_t count, void* stream) {
    std::vector<void*> to(count);
#if CUDART_VERSION >= 13000
    std::vector<const void*> from(count);
#else
    std::vector<void*> from(count);
#endif
    std::vector<size_t> bytes(count);
    for (size_t i = 0; i < count; ++i) {
      to[i] = pieces[i].to;
      from[i] = const_cast<std::byte*>(pieces[i].from);
      bytes[i] = static_cast<size_t>(pieces[i].bytes);
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
#if CUDART_VERSION >= 13000
    return seen(cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), count, &attributes, &first, 1, as_stream(stream)));
#else
    size_t failed = 0;
    return seen(cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), count, &attributes, &first, 1, &failed, as_stream(stream)));
#endif
  }

  std::atomic<bool> batches_{true};
#endif
};

}  // namespace
}  // namespace mtserve::cuda

// For whoever loads this library without having been linked to it.
extern "C" __attribute__((visibility("default"))) mtserve::CudaApi* mtserve_make_cuda_api() { return new mtserve::cuda::Api; }
