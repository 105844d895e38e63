// Random traffic on the simulated runtime: every schedule is checked for unordered accesses, and every byte that
// attention reads for being the byte that was appended for that user, content, layer and position.
//
//   sim_orderings [--seeds N] [--first SEED] [--onload direct|staged] [--offload direct|staged] [--faults]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "runtime/sim.h"
#include "transfer/slices.h"

using namespace mtserve;

namespace {

constexpr int kUsers = 6, kLayers = 2, kPageSize = 2, kPages = 18, kRegion = 8, kChunk = 8, kSlot = 2, kChunks = 14;
constexpr int64_t kRowK = 8, kRowV = 16;

struct Options {
  uint64_t seeds = 200, first = 1;
  EngineOptions engine;
  bool faults = false;
};

uint64_t tag(int64_t user, int32_t content, int32_t layer, int32_t position, bool is_v) {
  uint64_t x = 1 + user + 1000 * (content + 1000 * (layer + 10 * (position + 1000 * (is_v ? 1 : 0))));
  x *= 0x9e3779b97f4a7c15ull;
  return x ^ (x >> 29);
}

struct Traffic {
  SimRuntime* sim;  // the engine owns it
  std::vector<std::byte> memory;
  DeviceTable table;
  std::unique_ptr<Engine> engine;
  std::mt19937_64 random;
  int32_t length[kUsers] = {}, content[kUsers] = {};
  int64_t reads = 0, wrong = 0, committed = 0, failed = 0;
  bool faults;

  Traffic(uint64_t seed, const Options& options) : random(seed * 7919), faults(options.faults) {
    IndexConfig config;
    config.page_size = kPageSize;
    config.num_pages = kPages;
    config.chunk_tokens = kChunk;
    config.slot_tokens = kSlot;
    config.num_chunks = kChunks;
    config.offload_quota_tokens = 40;
    Geometry geometry{kLayers, kPageSize, kSlot, kRowK, kRowV};
    memory.assign(kLayers * (kPages + kRegion) * geometry.page_bytes(), std::byte{0xEE});
    table = DeviceTable{memory.data(), kPages + kRegion, geometry.page_bytes()};
    auto runtime = std::make_unique<SimRuntime>(seed);
    sim = runtime.get();
    engine = std::make_unique<Engine>(config, geometry, table, nullptr, std::move(runtime), options.engine);
  }

  int pick(int n) { return static_cast<int>(random() % n); }

  std::byte* row(int32_t layer, PageId page, int32_t at, bool is_v) const {
    return table.page(layer, page) + (is_v ? kPageSize * kRowK + at * kRowV : at * kRowK);
  }

  struct Request {
    int64_t user;
    int32_t content, cached, tokens;
    std::vector<PageId> pages;
    bool stores;
  };

  void attend(Stream& compute, const std::shared_ptr<std::vector<Request>>& rows, int32_t layer, const std::shared_ptr<int64_t>& mismatches) {
    compute.launch(
        "attention",
        [this, rows, layer, mismatches] {
          for (const Request& r : *rows)
            for (int32_t t = 0; t < r.cached; ++t)
              for (const bool is_v : {false, true}) {
                uint64_t got;
                std::memcpy(&got, row(layer, r.pages[t / kPageSize], t % kPageSize, is_v), sizeof got);
                *mismatches += got != tag(r.user, r.content, layer, t, is_v);
                ++reads;
              }
        },
        [&] {
          Accesses out;
          for (const Request& r : *rows)
            for (int32_t t = 0; t < r.cached; ++t)
              for (const bool is_v : {false, true})
                out.push_back({row(layer, r.pages[t / kPageSize], t % kPageSize, is_v), is_v ? kRowV : kRowK, false});
          return out;
        });
  }

  void append(Stream& compute, const std::shared_ptr<std::vector<Request>>& rows, int32_t layer) {
    compute.launch(
        "append",
        [this, rows, layer] {
          for (const Request& r : *rows)
            for (int32_t t = r.cached; r.stores && t < r.tokens; ++t)
              for (const bool is_v : {false, true}) {
                const uint64_t value = tag(r.user, r.content, layer, t, is_v);
                std::memcpy(row(layer, r.pages[t / kPageSize], t % kPageSize, is_v), &value, sizeof value);
              }
        },
        [&] {
          Accesses out;
          for (const Request& r : *rows)
            for (int32_t t = r.cached; r.stores && t < r.tokens; ++t)
              for (const bool is_v : {false, true})
                out.push_back({row(layer, r.pages[t / kPageSize], t % kPageSize, is_v), is_v ? kRowV : kRowK, true});
          return out;
        });
  }

  void serve(Stream& compute) {
    const int n = 1 + pick(3);
    std::vector<RowRequest> requests;
    auto rows = std::make_shared<std::vector<Request>>();
    for (int i = 0; i < n; ++i) {
      const int user = pick(kUsers);
      length[user] = pick(12) == 0 ? length[user] / 2 : std::min(length[user] + pick(7), 22);
      requests.push_back({user, length[user], 0, nullptr});
      rows->push_back({user, content[user], 0, length[user], {}, false});
    }
    Engine::OpenBatch open;
    engine->begin(requests, 0, 1, open, &compute);
    for (int i = 0; i < n; ++i) {
      const BatchRow& granted = open.batch.rows[i];
      Request& r = (*rows)[i];
      r.cached = granted.cached;
      r.stores = granted.stores;
      r.pages.assign(open.batch.pages.begin() + granted.first_page, open.batch.pages.begin() + granted.first_page + granted.num_pages);
    }
    auto mismatches = std::make_shared<int64_t>(0);
    const bool gives_up = pick(10) == 0;
    bool good = true;
    for (int32_t layer = 0; layer < kLayers && good; ++layer) {
      good = engine->wait(open, layer);
      attend(compute, rows, layer, mismatches);
      append(compute, rows, layer);
      if (gives_up && layer == 0) break;
    }
    const std::vector<LoadPtr> loads = open.loads;
    if (gives_up || !good)
      engine->abort(open);
    else
      engine->commit(open);
    if (pick(2) == 0) {
      EventPtr end = sim->make_event();
      compute.record(end);
      sim->synchronize(end);
    }
    // Judged when the stream has run: a batch whose load failed never counts.
    compute.launch(
        "judge",
        [this, mismatches, loads] {
          for (const LoadPtr& load : loads)
            if (load->failed) {
              ++failed;
              return;
            }
          wrong += *mismatches;
          ++committed;
        },
        nullptr);
  }

  void caller(int batches) {
    auto compute = sim->make_stream("compute");
    for (int i = 0; i < batches; ++i) {
      if (faults && pick(6) == 0) (pick(2) == 0 ? sim->faults.onload_copy : sim->faults.offload_copy) = 1 + pick(4);
      switch (pick(12)) {
        case 0: {
          const int64_t user = pick(kUsers);
          ++content[user];  // the old events are gone, others took their place
          length[user] = 0;
          engine->evict(std::span(&user, 1));
          break;
        }
        case 1: {
          const int64_t user = pick(kUsers);
          engine->prefetch(std::span(&user, 1), 1);
          break;
        }
        case 2:
          if (pick(4) == 0) engine->flush();
          break;
        default:
          serve(*compute);
      }
    }
  }

  std::string run() {
    sim->spawn("caller 1", [this] { caller(10); });
    sim->spawn("caller 2", [this] { caller(10); });
    sim->run_dry();
    engine->drain();
    std::string problem = sim->problem();
    if (problem.empty() && wrong > 0) problem = "attention read " + std::to_string(wrong) + " wrong values";
    if (problem.empty()) problem = engine->index().check();
    engine->clear();
    const Gauges g = engine->index().gauges();
    if (problem.empty() && (g.pages_free != g.pages_total || g.slots_free != g.slots_total || g.open_batches != 0 || g.transfers_in_flight != 0))
      problem = "pages, slots or pins leaked";
    engine->close();
    return problem;
  }
};

Strategy strategy(const std::string& name) {
  if (name == "direct") return Strategy::direct;
  if (name == "staged") return Strategy::staged;
  std::fprintf(stderr, "unknown strategy %s: use direct or staged\n", name.c_str());
  std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--faults") {
      options.faults = true;
      continue;
    }
    if (i + 1 == argc) return std::fprintf(stderr, "%s needs a value\n", name.c_str()), 2;
    const std::string value = argv[++i];
    if (name == "--seeds") options.seeds = std::stoull(value);
    else if (name == "--first") options.first = std::stoull(value);
    else if (name == "--onload") options.engine.onload = strategy(value);
    else if (name == "--offload") options.engine.offload = strategy(value);
    else return std::fprintf(stderr, "unknown option %s\n", name.c_str()), 2;
  }
  int64_t reads = 0, committed = 0, failed = 0, onloads = 0, offloads = 0;
  for (uint64_t seed = options.first; seed < options.first + options.seeds; ++seed) {
    Traffic traffic(seed, options);
    const std::string problem = traffic.run();
    if (!problem.empty()) return std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), problem.c_str()), 1;
    reads += traffic.reads;
    committed += traffic.committed;
    failed += traffic.failed;
    const Counters c = traffic.engine->index().counters();
    onloads += c.onloads;
    offloads += c.offloads;
  }
  std::printf("%llu schedules, %lld batches, %lld failed by injected faults, %lld onloads, %lld offloads, %lld values read: all ordered, all right\n",
              static_cast<unsigned long long>(options.seeds), static_cast<long long>(committed), static_cast<long long>(failed),
              static_cast<long long>(onloads), static_cast<long long>(offloads), static_cast<long long>(reads));
  return 0;
}
