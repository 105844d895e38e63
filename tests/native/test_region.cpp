// The onload region: read before it is scattered, in place of pages that cannot be had, and never overwritten while
// somebody still reads it.
#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/engine.h"
#include "runtime/sim.h"
#include "runtime/threads.h"

using namespace mtserve;

namespace {

constexpr int32_t kLayers = 2, kPageSize = 4, kPages = 12, kRegion = 8;
constexpr int64_t kRowK = 8, kRowV = 16;

// Threads, with a scatter stream that stands still until the gate is opened.
class GatedRuntime : public ThreadsRuntime {
 public:
  std::unique_ptr<Stream> make_stream(const std::string& name) override {
    auto stream = ThreadsRuntime::make_stream(name);
    if (name == "scatter") stream->launch("gate", [this] { gate_->wait(); }, nullptr);
    return stream;
  }
  void open() { gate_->set(); }

 private:
  std::shared_ptr<Latch> gate_ = make_latch();
};

IndexConfig config() {
  return {.page_size = kPageSize, .num_pages = kPages, .chunk_tokens = 16, .slot_tokens = 4, .num_chunks = 8};
}

uint64_t value(int64_t user, int32_t layer, int32_t token, bool is_v) {
  return (static_cast<uint64_t>(user) * 1000 + token) * 8 + layer * 2 + is_v + 1;
}

struct Server {
  Geometry geometry{kLayers, kPageSize, 4, kRowK, kRowV};
  std::vector<std::byte> memory;
  DeviceTable table;
  GatedRuntime* runtime = nullptr;
  std::unique_ptr<Engine> engine;

  explicit Server(bool gated) {
    memory.assign(kLayers * (kPages + kRegion) * geometry.page_bytes(), std::byte{0xEE});
    table = {memory.data(), kPages + kRegion, geometry.page_bytes()};
    std::unique_ptr<Runtime> made;
    if (gated) {
      made = std::make_unique<GatedRuntime>();
      runtime = static_cast<GatedRuntime*>(made.get());
    }
    EngineOptions options;
    options.onload = Strategy::staged;
    options.read_region = true;
    engine = std::make_unique<Engine>(config(), geometry, table, nullptr, std::move(made), options);
  }

  void begin(int64_t user, int32_t tokens, Engine::OpenBatch& open, int rows = 1) {
    const std::vector<RowRequest> requests(rows, RowRequest{user, tokens, 0, nullptr});
    engine->begin(requests, 0, 1, open);
  }

  std::byte* at(int32_t layer, PageId page, int32_t token, bool is_v) {
    return table.page(layer, page) + (is_v ? kPageSize * kRowK + token % kPageSize * kRowV : token % kPageSize * kRowK);
  }

  void append(const Engine::OpenBatch& open, int64_t user, int32_t layer) {
    const BatchRow& r = open.batch.rows[0];
    for (int32_t t = r.cached; r.stores && t < r.tokens; ++t)
      for (const bool is_v : {false, true}) {
        const uint64_t v = value(user, layer, t, is_v);
        std::memcpy(at(layer, open.batch.pages[r.first_page + t / kPageSize], t, is_v), &v, sizeof v);
      }
  }

  bool reads_right(const Engine::OpenBatch& open, int64_t user, int32_t layer, int row = 0) {
    const BatchRow& r = open.batch.rows[row];
    bool right = true;
    for (int32_t t = 0; t < r.cached; ++t)
      for (const bool is_v : {false, true}) {
        uint64_t got;
        std::memcpy(&got, at(layer, open.batch.cached_page(r, t / kPageSize), t, is_v), sizeof got);
        right &= got == value(user, layer, t, is_v);
      }
    return right;
  }

  void store(int64_t user, int32_t tokens) {
    Engine::OpenBatch open;
    begin(user, tokens, open);
    CHECK(open.batch.rows[0].stores);
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      CHECK(engine->wait(open, layer));
      append(open, user, layer);
    }
    engine->commit(open);
    engine->flush();
  }

  // Everything else leaves the device; the pages are kept from others until the batch is dropped.
  std::unique_ptr<Engine::OpenBatch> take_every_page() {
    auto open = std::make_unique<Engine::OpenBatch>();
    begin(999, kPages * kPageSize, *open);
    CHECK(open->batch.rows[0].stores);
    return open;
  }

  Gauges gauges() { return engine->index().gauges(); }
};

void read_before_it_is_scattered() {
  Server server(true);
  server.store(1, 22);
  server.take_every_page();
  Engine::OpenBatch open;
  server.begin(1, 25, open);
  const BatchRow& r = open.batch.rows[0];
  CHECK_EQ(r.cached, 22);
  CHECK(r.stores && open.batch.cached_page(r, 0) >= kPages && open.batch.pages[r.first_page] < kPages);
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    CHECK(server.engine->wait(open, layer));
    CHECK(server.reads_right(open, 1, layer));
    server.append(open, 1, layer);
  }
  // A kernel that reads the delta from pages needs the rest there too.
  std::atomic<bool> in_pages{false}, waiting{false};
  std::thread waits([&] {
    waiting = true;
    CHECK(server.engine->wait(open, 0, true));
    in_pages = true;
  });
  while (!waiting) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // time enough to go wrong
  CHECK(!in_pages);
  server.engine->commit(open);
  Engine::OpenBatch next;
  server.begin(1, 25, next);
  CHECK_EQ(next.batch.rows[0].cached, 25);
  CHECK(next.batch.cached_page(next.batch.rows[0], 0) < kPages);
  std::atomic<bool> read{false};
  std::thread reads([&] {
    CHECK(server.engine->wait(next, 0));
    CHECK(server.reads_right(next, 1, 0));
    read = true;
  });
  CHECK_EQ(server.gauges().region_pages_free, int64_t{kRegion - 6});
  CHECK(!in_pages && !read);
  server.runtime->open();
  waits.join();
  reads.join();
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    CHECK(server.engine->wait(next, layer));
    CHECK(server.reads_right(next, 1, layer));
  }
  server.engine->commit(next);
  server.engine->drain();
  CHECK_EQ(server.gauges().region_pages_free, int64_t{kRegion});
}

void rows_without_pages_are_served_from_the_region() {
  for (const bool fails : {false, true}) {
    Server server(false);
    server.store(1, 22);
    const auto others = server.take_every_page();
    if (fails) server.engine->runtime().faults.onload_copy = 3;
    Engine::OpenBatch open;
    server.begin(1, 25, open, 2);
    CHECK_EQ(server.engine->index().counters().rows_from_region, uint64_t{1});
    for (const BatchRow& r : open.batch.rows) CHECK(r.cached == 22 && !r.stores);
    bool good = true;
    for (int32_t layer = 0; layer < kLayers && good; ++layer) {
      good = server.engine->wait(open, layer);
      for (const int row : {0, 1}) CHECK(!good || server.reads_right(open, 1, layer, row));
    }
    CHECK_EQ(good, !fails);
    if (good)
      server.engine->commit(open);
    else
      server.engine->abort(open);
    server.engine->drain();
    CHECK_EQ(server.engine->index().lengths(1, 1).committed, fails ? -1 : 22);
    CHECK_EQ(server.gauges().region_pages_free, int64_t{kRegion});
    server.engine->abort(*others);
    CHECK(server.engine->index().check().empty());
  }
}

void a_span_that_is_read_is_not_overwritten() {
  Server server(false);
  server.store(1, 22);
  server.store(2, 20);
  server.take_every_page();
  Engine::OpenBatch first;
  server.begin(1, 22, first);
  server.engine->drain();
  // 6 of 8 pages are being read: the next onload needs 5 and goes straight into pages.
  Engine::OpenBatch second;
  server.begin(2, 20, second);
  CHECK_EQ(second.batch.rows[0].cached, 20);
  CHECK(second.batch.regions.empty());
  server.engine->drain();
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    CHECK(server.engine->wait(second, layer) && server.reads_right(second, 2, layer));
    CHECK(server.engine->wait(first, layer) && server.reads_right(first, 1, layer));
  }
  server.engine->commit(first);
  server.engine->commit(second);
  CHECK_EQ(server.gauges().region_pages_free, int64_t{kRegion});
}

// In device time: the batch is over, its attention has not run.
void the_next_onload_waits_for_the_last_reader() {
  IndexConfig c = config();
  c.region_pages = kRegion;
  c.read_region = true;
  Index index(c);
  const auto store = [&](int64_t user) {
    const RowRequest request{user, 22, 0, nullptr};
    Batch batch;
    std::vector<TransferTask> onloads, offloads, next;
    index.begin(std::span(&request, 1), 0, 1, batch, onloads);
    index.commit(batch, offloads);
    index.plan_flush(offloads);
    while (!offloads.empty()) {
      for (const TransferTask& task : offloads) index.offload_gathered(task);
      for (const TransferTask& task : offloads) index.offload_done(task, true, next);
      offloads.swap(next);
      next.clear();
      index.plan_flush(offloads);
    }
  };
  store(1);
  store(2);
  const RowRequest everything{999, kPages * kPageSize, 0, nullptr};
  Batch others;
  std::vector<TransferTask> onloads;
  index.begin(std::span(&everything, 1), 0, 1, others, onloads);
  CHECK(others.rows[0].stores && onloads.empty());
  const RowRequest one{1, 22, 0, nullptr}, two{2, 22, 0, nullptr};
  Batch reads;
  index.begin(std::span(&one, 1), 0, 1, reads, onloads);
  CHECK_EQ(onloads.size(), size_t{1});
  CHECK(onloads[0].pages.empty() && onloads[0].region >= kPages);
  std::vector<TransferTask> next;
  index.onload_done(onloads[0], true, next);
  CHECK(next.empty());
  Batch refused;
  std::vector<TransferTask> none;
  index.begin(std::span(&two, 1), 0, 1, refused, none);
  CHECK(none.empty() && refused.rows[0].cached == 0);
  index.abort(refused, false);
  std::vector<TransferTask> offloads;
  const Fence used = index.commit(reads, offloads);
  Batch again;
  index.begin(std::span(&two, 1), 0, 1, again, none);
  CHECK_EQ(none.size(), size_t{1});
  CHECK_EQ(none[0].after, used);
  CHECK(index.check().empty());
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"read before it is scattered", read_before_it_is_scattered},
                    {"rows without pages are served from the region", rows_without_pages_are_served_from_the_region},
                    {"a span that is read is not overwritten", a_span_that_is_read_is_not_overwritten},
                    {"the next onload waits for the last reader", the_next_onload_waits_for_the_last_reader}});
}
