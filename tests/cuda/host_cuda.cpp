// A library like _cuda_api whose device is the host: every call is carried out at once. It counts what is taken and
// fails where it is told to, so that Python sees a cache on CUDA without one.
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "runtime/cuda.h"

namespace mtserve {
namespace {

std::mutex mutex;
std::map<std::string, std::pair<int, int>> faults;  // by call: countdown, code
std::map<std::string, int> left;

int struck(const char* call) {
  std::lock_guard lock(mutex);
  auto& [countdown, code] = faults[call];
  return countdown > 0 && --countdown == 0 ? code : 0;
}

void count(const char* what, int change) {
  std::lock_guard lock(mutex);
  left[what] += change;
}

class HostCuda : public CudaApi {
 public:
  int get_device(int* device) override { return *device = 0; }
  int set_device(int) override { return 0; }
  int create_stream(void** stream) override { return make("streams", stream); }
  int destroy_stream(void* stream) override { return gone("streams", static_cast<int64_t*>(stream)); }
  int synchronize_stream(void*) override { return 0; }
  int create_event(void** event, bool) override { return make("events", event); }
  int destroy_event(void* event) override { return gone("events", static_cast<int64_t*>(event)); }
  int record(void* event, void*) override {
    *static_cast<int64_t*>(event) = Timeline::now();
    return 0;
  }
  int query(void*) override { return 0; }
  int synchronize(void*) override { return struck("synchronize"); }
  int wait(void*, void*) override { return 0; }
  int elapsed(float* milliseconds, void* from, void* to) override {
    *milliseconds = static_cast<float>(static_cast<double>(*static_cast<int64_t*>(to) - *static_cast<int64_t*>(from)) * 1e-6);
    return 0;
  }
  int copy(const Piece* pieces, size_t n, Route, void*) override { return move("copy", pieces, n); }
  int copy_by_kernel(const Piece* pieces, size_t n, void*) override { return move("copy_by_kernel", pieces, n); }
  int allocate_pinned(void** memory, int64_t bytes) override { return take("allocate_pinned", memory, bytes); }
  int free_pinned(void* memory) override { return gone("memory", static_cast<std::byte*>(memory)); }
  int create_pool(void** pool, int) override { return make("pools", pool); }
  int destroy_pool(void* pool) override { return gone("pools", static_cast<int64_t*>(pool)); }
  int allocate_device(void** memory, int64_t bytes, void*, void*) override { return take("allocate_device", memory, bytes); }
  int free_device(void* memory, void*) override { return gone("memory", static_cast<std::byte*>(memory)); }
  int pin(void*, int64_t) override {
    if (const int code = struck("pin")) return code;
    count("pins", 1);
    return 0;
  }
  int unpin(void*) override {
    count("pins", -1);
    return 0;
  }
  const char* describe(int error) override { return error == kOutOfMemory ? "out of memory" : "an illegal memory access was encountered"; }

 private:
  static int make(const char* what, void** out) {
    count(what, 1);
    *out = new int64_t(0);
    return 0;
  }
  static int take(const char* call, void** memory, int64_t bytes) {
    if (const int code = struck(call)) return code;
    count("memory", 1);
    *memory = new std::byte[static_cast<size_t>(bytes)];
    return 0;
  }
  static int gone(const char* what, int64_t* object) {
    count(what, -1);
    delete object;
    return 0;
  }
  static int gone(const char* what, std::byte* memory) {
    count(what, -1);
    delete[] memory;
    return 0;
  }
  static int move(const char* call, const Piece* pieces, size_t n) {
    if (const int code = struck(call)) return code;
    for (size_t i = 0; i < n; ++i) std::memcpy(pieces[i].to, pieces[i].from, static_cast<size_t>(pieces[i].bytes));
    return 0;
  }
};

}  // namespace
}  // namespace mtserve

extern "C" {
mtserve::CudaApi* mtserve_make_cuda_api() { return new mtserve::HostCuda; }

void host_cuda_fail(const char* call, int countdown, int code) {
  std::lock_guard lock(mtserve::mutex);
  mtserve::faults[call] = {countdown, code};
}

// What is taken and not given back; `what` empty: all of it.
int host_cuda_left(const char* what) {
  std::lock_guard lock(mtserve::mutex);
  if (*what != 0) return mtserve::left[what];
  int sum = 0;
  for (const auto& [name, n] : mtserve::left) sum += n;
  return sum;
}
}
