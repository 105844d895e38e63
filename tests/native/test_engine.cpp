// The engine on real threads, over a tier that is not the host arena: contract, faults, many threads, shutdown.
#include <chrono>
#include <memory>
#include <random>
#include <thread>

#include "check.h"
#include "engine/engine.h"
#include "strict_tier.h"

using namespace mtserve;

namespace {

constexpr int32_t kLayers = 3, kPageSize = 4, kSlot = 4, kChunk = 16;
constexpr int64_t kRowK = 8, kRowV = 16;

uint64_t tag(int64_t user, int64_t content, int32_t layer, int32_t position, bool is_v) {
  uint64_t x = static_cast<uint64_t>(user) * 1000003 + static_cast<uint64_t>(content);
  x = (x * 64 + layer) * 100000 + position * 2 + is_v + 1;
  x *= 0x9e3779b97f4a7c15ull;
  return x ^ (x >> 31);
}

struct Server {
  IndexConfig config;
  Geometry geometry{kLayers, kPageSize, kSlot, kRowK, kRowV};
  TierProbe probe;
  std::vector<std::byte> memory;
  DeviceTable table;
  std::unique_ptr<Engine> engine;

  Server(int32_t pages, int32_t chunks, EngineOptions options = {}, bool strict = true, bool tail_write_back = true) {
    config.page_size = kPageSize;
    config.num_pages = pages;
    config.chunk_tokens = kChunk;
    config.slot_tokens = kSlot;
    config.num_chunks = chunks;
    config.offload_quota_tokens = 64;
    config.tail_write_back = tail_write_back;
    const int32_t region = options.onload == Strategy::staged ? 12 : 0;
    memory.assign(kLayers * (pages + region) * geometry.page_bytes(), std::byte{0xEE});
    table = DeviceTable{memory.data(), pages + region, geometry.page_bytes()};
    std::unique_ptr<Tier> tier;
    if (strict) tier = std::make_unique<StrictTier>(geometry, int64_t{chunks} * (kChunk / kSlot), probe);
    engine = std::make_unique<Engine>(config, geometry, table, std::move(tier), nullptr, options);
  }

  std::byte* row(int32_t layer, PageId page, int32_t at, bool is_v) const {
    return table.page(layer, page) + (is_v ? kPageSize * kRowK + at * kRowV : at * kRowK);
  }

  // What one layer of a row reads must be what was written; then it writes its own.
  void read_and_append(const Batch& batch, const BatchRow& r, int64_t user, int64_t content, int32_t layer) const {
    for (int32_t t = 0; t < r.tokens; ++t)
      for (const bool is_v : {false, true}) {
        if (t >= r.cached && !r.stores) continue;
        const PageId page = t < r.cached ? batch.cached_page(r, t / kPageSize) : batch.pages[r.first_page + t / kPageSize];
        std::byte* at = row(layer, page, t % kPageSize, is_v);
        const uint64_t want = tag(user, content, layer, t, is_v);
        uint64_t got = want;
        if (t < r.cached)
          std::memcpy(&got, at, sizeof got);
        else
          std::memcpy(at, &want, sizeof want);
        CHECK_EQ(got, want);
      }
  }

  enum class Outcome { committed, aborted, load_failed };

  // One request; `give_up` aborts it after that layer.
  Outcome serve(int64_t user, int64_t content, int32_t tokens, int32_t* cached = nullptr, int32_t give_up = -1) {
    const RowRequest request{user, tokens, 0, nullptr};
    Engine::OpenBatch open;
    engine->begin(std::span(&request, 1), 0, 1, open);
    const BatchRow& r = open.batch.rows[0];
    if (cached != nullptr) *cached = r.cached;
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      if (!engine->wait(open, layer)) {
        engine->abort(open);
        return Outcome::load_failed;
      }
      read_and_append(open.batch, r, user, content, layer);
      if (layer == give_up) {
        engine->abort(open);
        return Outcome::aborted;
      }
    }
    engine->commit(open);
    return Outcome::committed;
  }

  // Asks for pages, for all by default, and gives them back: what they held has left the device. All or nothing.
  void push_out(int32_t pages = 0) {
    const RowRequest request{-999, (pages > 0 ? pages : config.num_pages) * kPageSize, 0, nullptr};
    Engine::OpenBatch open;
    engine->begin(std::span(&request, 1), 0, 1, open);
    engine->abort(open);
  }

  Index::Lengths lengths(int64_t user) { return engine->index().lengths(user, 1); }
  Counters counters() { return engine->index().counters(); }

  void everything_is_free() {
    engine->drain();
    check();
    engine->clear();
    const Gauges g = engine->index().gauges();
    CHECK_EQ(g.pages_free, g.pages_total);
    CHECK_EQ(g.slots_free, g.slots_total);
    CHECK_EQ(g.entries + g.open_batches + g.transfers_in_flight + g.pending_offload_tokens, int64_t{0});
    CHECK_EQ(probe.blocks.load(), int64_t{0});
  }

  void check() {
    const std::string problem = engine->index().check();
    if (!problem.empty()) std::fprintf(stderr, "%s\n", problem.c_str());
    CHECK(problem.empty());
  }
};

const EngineOptions kStrategies[] = {{Strategy::direct, Strategy::direct},
                                     {Strategy::direct, Strategy::staged},
                                     {Strategy::staged, Strategy::direct},
                                     {Strategy::staged, Strategy::staged},
                                     {Strategy::staged, Strategy::direct, 0, true}};

// Without a pause the copies' threads would hardly ever run between two requests.
void think() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

void second_tier() {
  for (const EngineOptions& options : kStrategies) {
    Server server(30, 14, options);
    std::mt19937 random(5);
    int32_t length[8] = {}, content[8] = {};
    int64_t hits = 0;
    for (int step = 0; step < (quick ? 300 : 1500); ++step) {
      const int user = static_cast<int>(random() % 8);
      length[user] = random() % 10 == 0 ? length[user] / 2 : std::min(length[user] + static_cast<int>(random() % 9), 50);
      int32_t cached = 0;
      CHECK(server.serve(user, content[user], length[user], &cached, random() % 12 == 0 ? 1 : -1) != Server::Outcome::load_failed);
      hits += cached;
      if (random() % 6 == 0) server.push_out();
      if (random() % 30 == 0) server.engine->flush();
      if (random() % 25 == 0) {
        const int64_t gone = user;
        server.engine->evict(std::span(&gone, 1));
        ++content[user];
        length[user] = 0;
      }
      if (step % 50 == 0) server.check();
    }
    const Counters c = server.counters();
    CHECK(hits > 0 && c.host_hit_tokens > 0 && c.host_evicted_tokens > 0 && c.tail_write_backs > 0);
    CHECK_EQ(c.onload_failures + c.offload_failures, uint64_t{0});
    CHECK(server.probe.drops > 0);
    server.everything_is_free();
  }
}

void failing_reads() {
  for (const EngineOptions& options : kStrategies)
    // 43 tokens: 3 blocks in each of 3 layers.
    for (int n = 1; n <= 10; ++n) {
      Server server(40, 14, options);
      server.serve(1, 0, 43);
      server.engine->flush();
      server.push_out();
      CHECK_EQ(server.lengths(1).device, 0);
      server.probe.fail_read = n;
      int32_t cached = 0;
      const auto outcome = server.serve(1, 0, 45, &cached);
      CHECK_EQ(cached, 43);
      server.engine->drain();
      server.check();
      const Counters c = server.counters();
      if (n == 10) {
        CHECK(outcome == Server::Outcome::committed);
        CHECK_EQ(server.lengths(1).committed, 45);
      } else {
        CHECK(outcome == Server::Outcome::load_failed);
        // Never published: what could not be read does not count as cached, and is counted as lost.
        CHECK_EQ(server.lengths(1).committed, -1);
        CHECK_EQ(c.onload_failures, uint64_t{1});
        CHECK_EQ(c.lost_tokens, uint64_t{43});
        CHECK_EQ(server.probe.blocks.load(), int64_t{0});
      }
      server.probe.fail_read = 0;
      CHECK(server.serve(1, 0, 45, &cached) == Server::Outcome::committed);
      CHECK_EQ(cached, n == 10 ? 45 : 0);
      CHECK(server.serve(1, 0, 45, &cached) == Server::Outcome::committed);
      CHECK_EQ(cached, 45);
      server.everything_is_free();
    }
}

// A batch that appends without ever waiting must not publish what its failed load left.
void failing_read_under_a_batch_that_does_not_wait() {
  for (const EngineOptions& options : kStrategies)
    for (const bool commit_first : {false, true}) {
      Server server(40, 14, options);
      server.serve(1, 0, 40);
      server.engine->flush();
      server.push_out();
      server.engine->runtime().faults.delay_us = commit_first ? 20'000 : 0;
      server.probe.fail_read = 4;
      const RowRequest request{1, 45, 0, nullptr};
      {
        Engine::OpenBatch open;
        server.engine->begin(std::span(&request, 1), 0, 1, open);
        if (!commit_first) server.engine->drain();
        server.engine->commit(open);
      }
      server.engine->drain();
      server.engine->runtime().faults.delay_us = 0;
      server.probe.fail_read = 0;
      server.check();
      int32_t cached = 0;
      server.serve(1, 0, 45, &cached);
      CHECK_EQ(cached, 0);
      server.everything_is_free();
    }
}

void failing_writes() {
  for (const EngineOptions& options : kStrategies)
    for (int n = 1; n <= 10; ++n)
      for (const bool at_reserve : {false, true}) {
        Server server(40, 14, options, true, false);
        (at_reserve ? server.probe.fail_reserve : server.probe.fail_write) = n;
        server.serve(1, 0, 48);
        server.engine->drain();
        server.check();
        const bool failed = n <= (at_reserve ? 3 : 9);
        CHECK_EQ(server.counters().offload_failures, uint64_t{failed});
        CHECK_EQ(server.lengths(1).host, failed ? 0 : 48);
        CHECK_EQ(server.lengths(1).committed, 48);
        CHECK_EQ(server.probe.blocks.load(), failed ? int64_t{0} : int64_t{3});
        server.probe.fail_reserve = server.probe.fail_write = 0;
        // The next visit that brings something tries again.
        server.serve(1, 0, 49);
        server.engine->drain();
        CHECK_EQ(server.lengths(1).host, 48);
        server.push_out();
        int32_t cached = 0;
        server.serve(1, 0, 49, &cached);
        CHECK_EQ(cached, 48);
        server.everything_is_free();
      }
}

// The tail continued in place keeps what it held when the copy behind it fails.
void failing_write_into_a_tail() {
  for (const EngineOptions& options : kStrategies) {
    Server server(40, 14, options);
    server.serve(1, 0, 5);
    server.engine->flush();
    server.serve(1, 0, 8);
    server.probe.fail_write = 2;
    server.engine->flush();
    CHECK_EQ(server.counters().offload_failures, uint64_t{1});
    CHECK_EQ(server.lengths(1).host, 5);
    CHECK_EQ(server.probe.blocks.load(), int64_t{1});
    server.push_out();
    int32_t cached = 0;
    CHECK(server.serve(1, 0, 9, &cached) == Server::Outcome::committed);
    CHECK_EQ(cached, 5);
    server.everything_is_free();
  }
}

// In a boundary page only the rows that are committed move, in either direction: the others may be being appended.
void only_committed_rows_move() {
  for (const EngineOptions& options : kStrategies) {
    Server server(40, 14, options);
    int64_t written = 0;
    for (const int32_t tokens : {5, 7, 8, 18, 19}) {
      const int32_t before = std::max(server.lengths(1).host, 0);
      server.serve(1, 0, tokens);
      server.engine->flush();
      // The tail's block of 8 tokens is outgrown on the way to 18, and is then written again from the start.
      written += (tokens - (tokens == 18 ? 0 : before)) * kLayers;
      CHECK_EQ(server.probe.rows_written.load(), written);
    }
    server.push_out();
    std::fill(server.memory.begin(), server.memory.end(), std::byte{0xAB});
    const RowRequest request{1, 19, 0, nullptr};
    Engine::OpenBatch open;
    server.engine->begin(std::span(&request, 1), 0, 1, open);
    CHECK_EQ(open.batch.rows[0].cached, 19);
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      CHECK(server.engine->wait(open, layer));
      for (const bool is_v : {false, true})
        for (int64_t i = 0; i < (is_v ? kRowV : kRowK); ++i)
          CHECK(server.row(layer, open.batch.pages[4], 3, is_v)[i] == std::byte{0xAB});
    }
    CHECK_EQ(server.probe.rows_read.load(), int64_t{19} * kLayers);
    server.engine->abort(open);
    server.everything_is_free();
  }
}

void two_offloads_one_fails() {
  Server server(60, 14, {}, true, false);
  server.probe.fail_write = 4;  // user 1 has 3 writes
  server.engine->runtime().faults.delay_us = 1'000;
  server.serve(1, 0, 16);
  server.serve(2, 0, 16);
  server.engine->drain();
  CHECK_EQ(server.lengths(1).host, 16);
  CHECK_EQ(server.lengths(2).host, 0);
  CHECK_EQ(server.probe.blocks.load(), int64_t{1});
  server.serve(2, 0, 17);
  server.engine->drain();
  CHECK_EQ(server.lengths(2).host, 16);
  server.everything_is_free();
}

void many_threads() {
  for (const EngineOptions& options : kStrategies)
    for (const bool strict : {true, false}) {
      Server server(36, 14, options, strict);
      server.engine->runtime().faults.delay_us = 20;
      constexpr int kThreads = 3, kUsers = 6;
      std::atomic<int> running{kThreads};
      std::vector<std::thread> threads;
      for (int thread = 0; thread < kThreads; ++thread)
        threads.emplace_back([&, thread] {
          std::mt19937 random(thread + 100);
          // Longer where the machine is so busy that nothing has come back from the host yet.
          const int steps = quick ? 120 : 400;
          for (int step = 0; step < steps || (step < 40 * steps && server.counters().host_hit_tokens == 0); ++step) {
            // A user's content never changes, its length does.
            const int64_t user = random() % kUsers;
            const int32_t tokens = 20 + static_cast<int32_t>(random() % 30);
            switch (random() % 20) {
              case 0:
                server.engine->evict(std::span(&user, 1));
                break;
              case 1:
                server.engine->prefetch(std::span(&user, 1), 1);
                break;
              case 2:
                if (random() % 5 == 0) server.engine->clear();
                break;
              case 3:
                server.push_out(1 + static_cast<int32_t>(random() % 36));
                break;
              case 4: {
                // Two batches open at once, closed in the order they were opened.
                const RowRequest requests[2] = {{user, tokens, 0, nullptr}, {user + 1, tokens, 0, nullptr}};
                Engine::OpenBatch a, b;
                server.engine->begin(std::span(requests, 2), 0, 1, a);
                server.engine->begin(std::span(requests, 1), 0, 1, b);
                for (int32_t layer = 0; layer < kLayers; ++layer) {
                  CHECK(server.engine->wait(a, layer) && server.engine->wait(b, layer));
                  for (int i = 0; i < 2; ++i) server.read_and_append(a.batch, a.batch.rows[i], requests[i].user, 0, layer);
                  server.read_and_append(b.batch, b.batch.rows[0], user, 0, layer);
                }
                server.engine->commit(a);
                if (random() % 2 == 0) server.engine->commit(b);  // else it is dropped, which aborts it
                break;
              }
              default:
                CHECK(server.serve(user, 0, tokens, nullptr, random() % 10 == 0 ? 0 : -1) != Server::Outcome::load_failed);
            }
            if (step % 40 == 0) server.check();
            think();
          }
          --running;
        });
      threads.emplace_back([&] {
        while (running > 0) {
          server.engine->flush();
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      });
      for (std::thread& thread : threads) thread.join();
      CHECK(server.counters().host_hit_tokens > 0);
      server.everything_is_free();
    }
}

void faults_under_threads() {
  for (const EngineOptions& options : kStrategies) {
    Server server(36, 14, options);
    std::atomic<int64_t> failed{0};
    const auto seen_enough = [&] {
      const Counters c = server.counters();
      return c.onload_failures > 2 && c.offload_failures > 2 && failed > 2;
    };
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 3; ++thread)
      threads.emplace_back([&, thread] {
        std::mt19937 random(thread);
        for (int step = 0; step < 20'000 && (step < (quick ? 150 : 500) || !seen_enough()); ++step) {
          if (random() % 8 == 0) (random() % 2 == 0 ? server.probe.fail_read : server.probe.fail_write) = 1 + static_cast<int>(random() % 6);
          if (random() % 4 == 0) server.push_out(1 + static_cast<int32_t>(random() % 36));
          think();
          failed += server.serve(static_cast<int64_t>(random() % 6), 0, 10 + static_cast<int32_t>(random() % 40)) == Server::Outcome::load_failed;
        }
      });
    for (std::thread& thread : threads) thread.join();
    server.probe.fail_read = server.probe.fail_write = 0;
    CHECK(seen_enough());
    server.everything_is_free();
  }
}

// B9: both directions under way, batches open, and the engine is closed, or dies.
void shutdown() {
  for (const EngineOptions& options : kStrategies)
    for (const bool dies : {false, true}) {
      Server server(60, 14, options);
      server.serve(1, 0, 43);
      server.engine->flush();
      server.push_out();
      server.engine->runtime().faults.delay_us = 2'000;
      server.serve(2, 0, 48);  // an offload
      {
        const RowRequest request{1, 43, 0, nullptr};
        Engine::OpenBatch open;
        server.engine->begin(std::span(&request, 1), 0, 1, open);  // an onload
        CHECK_EQ(open.batch.rows[0].cached, 43);
        server.engine->close();
        server.engine->close();
        CHECK_EQ(server.engine->index().gauges().transfers_in_flight, int64_t{0});
        for (int32_t layer = 0; layer < kLayers; ++layer) {
          CHECK(server.engine->wait(open, layer));
          server.read_and_append(open.batch, open.batch.rows[0], 1, 0, layer);
        }
        server.engine->commit(open);
      }
      CHECK_EQ(server.engine->index().gauges().open_batches, int64_t{0});
      bool refused = false;
      try {
        server.serve(3, 0, 4);
      } catch (const std::runtime_error&) {
        refused = true;
      }
      CHECK(refused);
      server.engine->drain();
      server.engine->flush();
      if (dies) server.engine.reset();
    }
}

void closing_under_traffic() {
  for (const EngineOptions& options : kStrategies)
    for (int round = 0; round < (quick ? 3 : 20); ++round) {
      Server server(36, 14, options);
      server.engine->runtime().faults.delay_us = 20;
      std::atomic<int> refused{0};
      std::vector<std::thread> threads;
      for (int thread = 0; thread < 3; ++thread)
        threads.emplace_back([&, thread] {
          std::mt19937 random(thread + 31 * round);
          try {
            for (;;) {
              CHECK(server.serve(random() % 6, 0, 10 + random() % 40) != Server::Outcome::load_failed);
              if (random() % 5 == 0) server.push_out(1 + static_cast<int32_t>(random() % 36));
              if (random() % 9 == 0) {
                const int64_t user = random() % 6;
                server.engine->prefetch(std::span(&user, 1), 1);
              }
              think();
            }
          } catch (const std::runtime_error&) {
            ++refused;
          }
        });
      std::this_thread::sleep_for(std::chrono::milliseconds(1 + 3 * round));
      server.engine->close();
      for (std::thread& thread : threads) thread.join();
      CHECK_EQ(refused.load(), 3);
      const Gauges g = server.engine->index().gauges();
      CHECK_EQ(g.open_batches + g.transfers_in_flight, int64_t{0});
      server.check();
    }
}

void destruction_under_copies() {
  for (const EngineOptions& options : kStrategies) {
    Server server(60, 14, options);
    server.serve(1, 0, 43);
    server.engine->flush();
    server.push_out();
    server.engine->runtime().faults.delay_us = 1'000;
    const int64_t user = 1;
    server.engine->prefetch(std::span(&user, 1), 1);
    server.serve(2, 0, 48);
    server.engine.reset();
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"a second tier", second_tier},
                    {"failing reads", failing_reads},
                    {"failing read under a batch that does not wait", failing_read_under_a_batch_that_does_not_wait},
                    {"failing writes", failing_writes},
                    {"failing write into a tail", failing_write_into_a_tail},
                    {"only committed rows move", only_committed_rows_move},
                    {"two offloads, one fails", two_offloads_one_fails},
                    {"many threads", many_threads},
                    {"faults under threads", faults_under_threads},
                    {"shutdown", shutdown},
                    {"closing under traffic", closing_under_traffic},
                    {"destruction under copies", destruction_under_copies}});
}
