// The CUDA runtime on the fake device: errors are kept, told and never fatal; events behave as everywhere; what was
// queued runs before a stream goes.
#include <memory>
#include <span>
#include <string>

#include "check.h"
#include "engine/engine.h"
#include "fake_cuda.h"

using namespace mtserve;

namespace {

constexpr int32_t kLayers = 2, kPages = 12, kRegion = 8;
constexpr int64_t kRowK = 8, kRowV = 16;

struct Device {
  std::shared_ptr<FakeCuda> cuda;
  SimRuntime* sim = nullptr;
  std::unique_ptr<CudaRuntime> runtime;

  explicit Device(uint64_t seed = 1) {
    auto host = std::make_unique<SimRuntime>(seed);
    sim = host.get();
    cuda = std::make_shared<FakeCuda>(*sim);
    runtime = std::make_unique<CudaRuntime>(cuda, std::move(host), FakeCuda::device);
  }
};

template <class Call>
bool refuses(const Call& call, const std::string& says) {
  try {
    call();
  } catch (const std::exception& error) {
    return std::string(error.what()).find(says) != std::string::npos;
  }
  return false;
}

void events() {
  Device device;
  const EventPtr event = device.runtime->make_event();
  const auto stream = device.runtime->make_stream("one"), other = device.runtime->make_stream("two");
  CHECK(refuses([&] { event->done(); }, "not recorded"));
  CHECK(refuses([&] { stream->wait(event); }, "not recorded"));
  CHECK(refuses([&] { device.runtime->synchronize(event); }, "not recorded"));
  stream->record(event);
  other->wait(event);
  device.runtime->synchronize(event);
  CHECK(event->done());
  event->reset();
  CHECK(refuses([&] { event->done(); }, "not recorded"));
  const auto thread = device.runtime->make_host_thread("host");
  thread->record(event);
  device.runtime->synchronize(event);
  CHECK(event->done());
  CHECK(refuses([&] { stream->wait(event); }, "host thread"));
  CHECK(refuses([&] { stream->launch("attention", [] {}, nullptr); }, "attention"));
}

void a_stream_ends_its_work_first() {
  Device device;
  std::byte from[32], to[32]{};
  std::memset(from, 7, sizeof from);
  std::atomic<bool> failed{false};
  auto stream = device.runtime->make_stream("copies");
  stream->copy({"copy", Route::to_device, {{to, from, 20}, {to + 20, from + 20, 12}}, &failed, nullptr});
  stream.reset();
  CHECK(!failed && std::memcmp(to, from, sizeof to) == 0);
}

struct Server {
  Geometry geometry{kLayers, 4, 4, kRowK, kRowV};
  std::vector<std::byte> memory;
  std::shared_ptr<FakeCuda> cuda;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<FakeCompute> compute;

  explicit Server(const EngineOptions& options) {
    memory.assign(kLayers * (kPages + kRegion) * geometry.page_bytes(), std::byte{0xEE});
    Device device;
    cuda = device.cuda;
    const IndexConfig config{.page_size = 4, .num_pages = kPages, .chunk_tokens = 16, .slot_tokens = 4, .num_chunks = 8};
    auto* runtime = device.runtime.get();
    engine = std::make_unique<Engine>(config, geometry, DeviceTable{memory.data(), kPages + kRegion, geometry.page_bytes()}, nullptr,
                                      std::move(device.runtime), options);
    compute = std::make_unique<FakeCompute>(*runtime, *cuda);
  }

  void begin(int64_t user, int32_t tokens, Engine::OpenBatch& open) {
    const RowRequest request{user, tokens, 0, nullptr};
    engine->begin(std::span(&request, 1), 0, 1, open, compute.get());
  }

  bool serve(int64_t user, int32_t tokens) {
    Engine::OpenBatch open;
    begin(user, tokens, open);
    bool good = true;
    for (int32_t layer = 0; layer < kLayers && good; ++layer) good = engine->wait(open, layer);
    if (good)
      engine->commit(open);
    else
      engine->abort(open);
    return good;
  }

  void push_out() {
    Engine::OpenBatch open;
    begin(999, kPages * 4, open);
    engine->abort(open);
  }
};

const EngineOptions kStrategies[] = {{Strategy::direct, Strategy::direct}, {Strategy::staged, Strategy::staged}, {Strategy::staged, Strategy::direct, 0, true}};

// Row E6 of the scenarios.
void an_error_is_told_with_its_call_and_ends_nothing() {
  for (const EngineOptions& options : kStrategies)
    for (const bool on_device : {false, true}) {
      Server server(options);
      CHECK(server.serve(1, 22));
      server.engine->flush();
      server.push_out();
      (on_device ? server.cuda->fail_synchronize : server.cuda->fail_copy) = 1;
      const bool good = server.serve(1, 23);
      server.engine->drain();
      CHECK(on_device || !good);
      const std::string error = server.engine->runtime().error();
      CHECK(error.find("an illegal memory access was encountered") != std::string::npos);
      CHECK(error.find(on_device ? "cudaEventSynchronize" : "onload") != std::string::npos);
      CHECK(refuses([&] { server.serve(2, 5); }, error));
      CHECK(server.engine->index().check().empty());
      CHECK_EQ(server.engine->index().gauges().transfers_in_flight + server.engine->index().gauges().open_batches, int64_t{0});
      server.engine->close();
    }
}

void memory_that_cannot_be_had_is_no_error_of_the_device() {
  class Poor : public FakeCuda {
   public:
    using FakeCuda::FakeCuda;
    int allocate_device(void**, int64_t, void*) override { return 2; }
  };
  auto host = std::make_unique<SimRuntime>(1);
  auto cuda = std::make_shared<Poor>(*host);
  CudaRuntime runtime(cuda, std::move(host), FakeCuda::device);
  const auto stream = runtime.make_stream("offload");
  bool refused = false;
  try {
    runtime.allocate_on_device(100, *stream);
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  CHECK(refused && runtime.error().empty());
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"events", events},
                    {"a stream ends its work first", a_stream_ends_its_work_first},
                    {"an error is told with its call and ends nothing", an_error_is_told_with_its_call_and_ends_nothing},
                    {"memory that cannot be had is no error of the device", memory_that_cannot_be_had_is_no_error_of_the_device}});
}
