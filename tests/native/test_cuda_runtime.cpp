// The CUDA runtime on the fake device: errors are kept or survived, told and never fatal; events behave as everywhere;
// what was queued runs before a stream goes; what was taken is given back; each device is left to its own.
#include <algorithm>
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
  SimRuntime* sim = nullptr;
  CudaRuntime* runtime = nullptr;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<FakeCompute> compute;

  explicit Server(const EngineOptions& options, uint64_t seed = 1) : Server(options, Device(seed), FakeCuda::device) {}

  Server(const EngineOptions& options, Device device, int number) : cuda(device.cuda), sim(device.sim), runtime(device.runtime.get()) {
    memory.assign(kLayers * (kPages + kRegion) * geometry.page_bytes(), std::byte{0xEE});
    cuda->own(number, memory.data(), static_cast<int64_t>(memory.size()));
    const IndexConfig config{.page_size = 4, .num_pages = kPages, .chunk_tokens = 16, .slot_tokens = 4, .num_chunks = 8};
    engine = std::make_unique<Engine>(config, geometry, DeviceTable{memory.data(), kPages + kRegion, geometry.page_bytes()}, nullptr,
                                      std::move(device.runtime), options);
    compute = std::make_unique<FakeCompute>(*runtime, *cuda, number);
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
      (on_device ? server.cuda->synchronize_fault : server.cuda->copy_fault).countdown = 1;
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

// Also E6: what a call was refused for costs the transfer that it was for, and nothing else.
void an_error_that_the_device_survives_fails_one_transfer() {
  for (const EngineOptions& options : kStrategies)
    for (const int code : {CudaApi::kOutOfMemory, CudaApi::kInvalidValue, CudaApi::kOutOfResources}) {
      Server server(options);
      const auto counters = [&] { return server.engine->index().counters(); };
      CHECK(server.serve(1, 22));
      server.engine->flush();
      server.push_out();
      server.cuda->copy_fault = {1, code};
      CHECK(!server.serve(1, 23));
      server.engine->drain();
      CHECK_EQ(counters().onload_failures, uint64_t{1});
      CHECK(server.runtime->error().empty());
      const std::string warning = server.runtime->take_warning();
      CHECK(warning.find("onload") != std::string::npos && warning.find(server.cuda->describe(code)) != std::string::npos);
      CHECK(server.serve(1, 24));
      CHECK(server.serve(2, 9));
      server.engine->flush();

      server.cuda->copy_fault = {1, code};
      CHECK(server.serve(3, 16));
      server.engine->drain();
      CHECK(server.cuda->copy_fault.countdown == 0 && counters().offload_failures == 1);
      CHECK(server.serve(3, 17));
      server.engine->flush();
      CHECK_EQ(server.engine->index().lengths(3, 1).host, 17);
      CHECK(server.runtime->error().empty() && server.runtime->take_warning().empty());
      CHECK(server.engine->index().check().empty() && server.sim->problem().empty());
      server.engine->close();
    }
}

void memory_that_cannot_be_had_is_no_error_of_the_device() {
  Server server({Strategy::staged, Strategy::staged});
  server.cuda->pool_fault = {1, CudaApi::kNotSupported};
  server.cuda->allocate_fault = {1, CudaApi::kOutOfMemory};
  CHECK(server.serve(1, 16));
  server.engine->drain();
  CHECK_EQ(server.engine->index().counters().offload_failures, uint64_t{1});
  CHECK(server.runtime->error().empty());
  CHECK(server.runtime->take_warning().find("cudaMemPoolCreate") != std::string::npos);
  CHECK(server.serve(1, 17));
  server.engine->flush();
  CHECK_EQ(server.engine->index().lengths(1, 1).host, 17);
  server.cuda->allocate_fault = {1, FakeCuda::kIllegalAddress};
  CHECK(server.serve(2, 16));
  server.engine->drain();
  CHECK(server.runtime->error().find("cudaMallocAsync") != std::string::npos);
}

void transient_memory_is_kept_until_the_cache_closes() {
  Server server({Strategy::staged, Strategy::staged});
  for (int64_t user = 0; user < 5; ++user) {
    CHECK(server.serve(user, 18));
    server.engine->flush();
  }
  CHECK(server.engine->index().counters().offloads >= 5);
  CHECK_EQ(server.cuda->pools_made, int64_t{1});
  CHECK_EQ(server.cuda->pools.size(), size_t{1});
  server.engine->close();
  CHECK(server.cuda->pools.empty());
}

void events_are_made_once() {
  Device device;
  const auto stream = device.runtime->make_stream("one");
  std::vector<EventPtr> held;
  for (int i = 0; i < 4; ++i) {
    held.push_back(device.runtime->make_event());
    stream->record(held.back());
  }
  const int64_t made = device.cuda->events_made;
  CHECK_EQ(made, int64_t{4});
  held.pop_back();
  held.push_back(device.runtime->make_event());
  CHECK_EQ(device.cuda->events_made, made);
  CHECK(refuses([&] { held.back()->done(); }, "not recorded"));
  held.push_back(device.runtime->make_event());  // all others are held
  CHECK_EQ(device.cuda->events_made, made + 1);

  // No more are kept than a bound.
  std::vector<EventPtr> many(3000);
  for (EventPtr& event : many) event = device.runtime->make_event();
  many.clear();
  CHECK(device.cuda->events_left >= 1000 && device.cuda->events_left < 2000);
  held.clear();
}

void a_long_stream_makes_no_more_events() {
  for (const EngineOptions& options : kStrategies) {
    Server server(options);
    int64_t before = 0;
    const int rounds = quick ? 60 : 200;
    for (int round = 0; round < 2 * rounds; ++round) {
      if (round == rounds) before = server.cuda->events_made;
      server.serve(round % 3, 20 + round / 3 % 4);
      server.engine->flush();
      server.push_out();
    }
    CHECK(server.engine->index().counters().onloads >= static_cast<uint64_t>(rounds));
    CHECK_EQ(server.cuda->events_made, before);
    CHECK(before < 100);
    const std::shared_ptr<FakeCuda> cuda = server.cuda;
    server.engine->close();
    server.compute.reset();
    server.engine.reset();
    CHECK_EQ(cuda->events_left + cuda->streams_left, int64_t{0});
  }
}

void the_timeline_shows_the_streams() {
  for (const EngineOptions& options : kStrategies) {
    const bool staged = options.onload == Strategy::staged;
    Server server(options);
    const auto work = [&] {
      CHECK(server.serve(1, 22));
      server.engine->flush();
      server.push_out();
      CHECK(server.serve(1, 23));
      server.engine->flush();
    };
    work();
    CHECK_EQ(server.cuda->timed_left, int64_t{0});

    server.engine->evict(std::vector<int64_t>{1});
    const int64_t started = Timeline::now();
    server.runtime->start_timeline(1000);
    server.sim->timeline.add("a thread", "of the host", Timeline::now());
    work();
    const int64_t ended = Timeline::now();
    // One that has not passed is left out, and nobody waits for it.
    server.cuda->query_fault = {1, CudaApi::kNotReady};
    server.cuda->synchronize_fault.countdown = 1;
    const size_t pieces = static_cast<size_t>(server.cuda->timed_left - 1) / 2;  // two events each, and the base
    const auto spans = server.runtime->take_timeline();
    CHECK_EQ(spans.size(), pieces);  // one left out, one of the host
    CHECK_EQ(server.cuda->synchronize_fault.countdown, int64_t{1});
    server.cuda->synchronize_fault = {};
    CHECK_EQ(server.cuda->timed_left, int64_t{0});
    CHECK(server.runtime->error().empty());

    constexpr int64_t kSlack = 20'000'000;  // between the base event and the host's clock
    std::map<std::string, int64_t> count, last_end;
    int64_t first_scatter = 0, first_onload = 0;
    for (const Timeline::Span& span : spans) {
      CHECK(span.begin >= started - kSlack && span.begin <= span.end && span.end <= ended + kSlack);
      CHECK(span.begin >= last_end[span.stream] - 1000);
      last_end[span.stream] = span.end;
      ++count[span.stream];
      if (span.stream == "scatter" && first_scatter == 0) first_scatter = span.begin;
      if (span.stream == "onload" && first_onload == 0) first_onload = span.end;
    }
    CHECK_EQ(count["a thread"], int64_t{1});
    CHECK(count["onload"] >= kLayers && count["offload"] >= kLayers);
    if (!staged || !options.read_region) CHECK((count["scatter"] > 0) == staged);
    if (first_scatter > 0) CHECK(first_scatter >= first_onload - 1000);

    server.runtime->start_timeline(3);
    server.engine->evict(std::vector<int64_t>{1});
    work();
    CHECK(server.cuda->timed_left <= 2 * 3 + 1);
    CHECK_EQ(server.runtime->take_timeline().size(), size_t{3});
    server.engine->evict(std::vector<int64_t>{1});
    server.runtime->start_timeline(10);
    work();
    const std::shared_ptr<FakeCuda> cuda = server.cuda;
    server.engine->close();
    server.compute.reset();
    server.engine.reset();
    CHECK_EQ(cuda->timed_left, int64_t{0});
  }
}

// What two caches of one process share: the threads of the simulation, and the devices that these have.
class SharedSim : public Runtime {
 public:
  explicit SharedSim(SimRuntime& sim) : sim_(sim) {}
  std::unique_ptr<Stream> make_stream(const std::string& name) override { return sim_.make_stream(name); }
  std::unique_ptr<Stream> make_host_thread(const std::string& name) override { return sim_.make_host_thread(name); }
  EventPtr make_event() override { return sim_.make_event(); }
  std::unique_ptr<Latch> make_latch() override { return sim_.make_latch(); }
  void synchronize(const EventPtr& event) override { sim_.synchronize(event); }
  void touch(const char* name, const AccessList& accesses) override { sim_.touch(name, accesses); }
  void locked() override { sim_.locked(); }
  void unlocking() override { sim_.unlocking(); }

 private:
  SimRuntime& sim_;
};

void two_devices_are_left_to_their_own() {
  for (const EngineOptions& options : kStrategies) {
    uint64_t onloads = 0;
    for (uint64_t seed = 1; seed <= (quick ? 5 : 30); ++seed) {
      SimRuntime sim(seed);
      const auto cuda = std::make_shared<FakeCuda>(sim);
      std::vector<std::unique_ptr<Server>> servers;
      const auto current = [&] {
        int device = -1;
        cuda->get_device(&device);
        return device;
      };
      for (const int number : {0, 1}) {
        Device device;
        device.cuda = cuda;
        device.sim = &sim;
        device.runtime = std::make_unique<CudaRuntime>(cuda, std::make_unique<SharedSim>(sim), number, options.offload == Strategy::direct);
        servers.push_back(std::make_unique<Server>(options, std::move(device), number));
        CHECK_EQ(current(), 0);
      }
      const auto caller = [&](int from) {
        cuda->set_device(from);
        for (int round = 0; round < 6; ++round)
          for (auto& server : servers) {
            server->serve(from, 16 + round);
            CHECK_EQ(current(), from);
            server->engine->flush();
            if (round % 2 == 1) server->push_out();
            if (round == 3) server->engine->prefetch(std::vector<int64_t>{1}, 1);
            server->runtime->start_timeline(5);
            server->runtime->take_timeline();
            server->engine->flush();
            CHECK_EQ(current(), from);
          }
      };
      sim.spawn("caller on 1", [&] { caller(1); });
      caller(0);
      sim.run_dry();
      for (auto& server : servers) {
        CHECK(server->runtime->error().empty() && server->runtime->take_warning().empty());
        onloads += server->engine->index().counters().onloads;
        CHECK(server->engine->index().counters().offloads > 0);
        CHECK(server->engine->index().check().empty());
        server->engine->close();
        CHECK_EQ(current(), 0);
      }
      CHECK(sim.problem().empty());
      servers.clear();
    }
    CHECK(onloads >= 10);
  }
}

void what_was_pinned_is_given_back() {
  SimRuntime sim(1);
  FakeCuda cuda(sim);
  const Geometry geometry{kLayers, 4, 4, kRowK, kRowV};
  constexpr int64_t kSlice = int64_t{2} << 20;
  HostArena arena(geometry, 4 * kSlice * 3 / geometry.slot_bytes(),
                  {[&](std::byte* at, int64_t bytes) { pin_host_memory(cuda, FakeCuda::device, at, bytes); }, [&](std::byte* at) { cuda.unpin(at); }});
  cuda.pin_fault = {3, CudaApi::kOutOfMemory};
  int64_t done = arena.touch(kSlice, 1);
  CHECK(done >= kSlice && done < arena.capacity());
  CHECK(arena.touch(kSlice, 1) > done);
  CHECK(refuses([&] { arena.touch(kSlice, 1); }, "cudaHostRegister (" + std::to_string(done) + " bytes): out of memory"));
  CHECK_EQ(cuda.pinned.size(), size_t{2});
  CHECK(std::all_of(cuda.pinned_from.begin(), cuda.pinned_from.end(), [](int from) { return from == FakeCuda::device; }));
  int here = -1;
  cuda.get_device(&here);
  CHECK_EQ(here, 0);
  arena.close();
  CHECK(cuda.pinned.empty());
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"events", events},
                    {"a stream ends its work first", a_stream_ends_its_work_first},
                    {"an error is told with its call and ends nothing", an_error_is_told_with_its_call_and_ends_nothing},
                    {"an error that the device survives fails one transfer", an_error_that_the_device_survives_fails_one_transfer},
                    {"memory that cannot be had is no error of the device", memory_that_cannot_be_had_is_no_error_of_the_device},
                    {"transient memory is kept until the cache closes", transient_memory_is_kept_until_the_cache_closes},
                    {"events are made once", events_are_made_once},
                    {"a long stream makes no more events", a_long_stream_makes_no_more_events},
                    {"the timeline shows the streams", the_timeline_shows_the_streams},
                    {"two devices are left to their own", two_devices_are_left_to_their_own},
                    {"what was pinned is given back", what_was_pinned_is_given_back}});
}
