// Random traffic on a cache over the simulated runtime. Every seed draws sizes, policies, strategies and callers of its
// own; every byte that attention reads is compared with what was appended for that user, content, version, layer and
// position, and what the index tells is compared with what it promises.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "fake_cuda.h"
#include "runtime/sim.h"

namespace mtserve {

// The caller's own thread as a stream of the simulated runtime, as the CPU build has it.
class InlineStream : public Stream {
 public:
  explicit InlineStream(SimRuntime& sim) : sim_(sim) {}
  void launch(const char* name, std::function<void()> work, const AccessList& accesses) override {
    if (accesses) sim_.touch(name, accesses);
    work();
  }
  void record(const EventPtr&) override { throw std::logic_error("work of an inline stream has run: no event stands for it"); }
  void wait(const EventPtr& event) override { sim_.synchronize(event); }
  bool is_inline() const override { return true; }

 private:
  SimRuntime& sim_;
};

// A host tier that now and then takes long to write, so that much happens while tokens are on their way to it.
class SlowTier : public HostArena {
 public:
  SlowTier(const Geometry& geometry, int64_t num_slots, SimRuntime& sim, int32_t patience)
      : HostArena(geometry, num_slots), sim_(sim), patience_(patience) {}
  void write(Block block, int32_t layer, std::span<const PageRows> rows) override {
    // Each latch is a moment at which others may run; it hands nothing over, since nobody waits for it.
    for (int32_t i = 0; i < patience_; ++i) sim_.make_latch()->set();
    HostArena::write(block, layer, rows);
  }

 private:
  SimRuntime& sim_;
  const int32_t patience_;
};

class Traffic {
 public:
  struct Tally {
    uint64_t reads = 0, wrong = 0, committed = 0, failed = 0;
  };

  // Strategies, `faults` and whether the device is one of CUDA as given; the rest comes from the seed.
  Traffic(uint64_t seed, const EngineOptions& options, bool faults, bool cuda = false) : random_(seed * 7919), faults_(faults) {
    const int32_t slot_pages = 1 + pick(2), slots_per_chunk = 1 << pick(3);
    const int32_t user_pages = 2 + pick(4), everybody = 4 + pick(9);
    config_.page_size = 1 + pick(3);
    config_.num_pages = user_pages * (2 + pick(everybody));
    config_.slot_tokens = config_.page_size * slot_pages;
    config_.chunk_tokens = config_.slot_tokens * slots_per_chunk;
    longest_ = config_.page_size * user_pages;
    const int32_t chunks = everybody * (longest_ / config_.chunk_tokens + 1);  // enough for everybody
    config_.num_chunks = pick(2) == 0 ? 1 + pick(chunks / 2) : chunks;
    config_.offload_quota_tokens = config_.chunk_tokens * (1 + pick(6));
    config_.tail_write_back = pick(5) != 0;
    config_.max_open_batches = pick(8) == 0 ? 2 : 8;
    users_.resize(everybody);
    hashed_ = pick(2) == 0;
    context_ = pick(3) == 0 ? 1 + pick(3) : 0;
    calm_ = pick(3) * 8;
    quitters_ = 1 + pick(2) * 3;
    const int32_t region = 1 + pick(2 * user_pages);
    geometry_ = {kLayers, config_.page_size, config_.slot_tokens, kRowK, kRowV};
    memory_.assign(static_cast<size_t>(kLayers * (config_.num_pages + region) * geometry_.page_bytes()), std::byte{0xEE});
    table_ = {memory_.data(), config_.num_pages + region, geometry_.page_bytes()};
    auto sim = std::make_unique<SimRuntime>(seed);
    sim_ = sim.get();
    std::unique_ptr<Runtime> runtime = std::move(sim);
    if (cuda) {
      cuda_ = std::make_shared<FakeCuda>(*sim_);
      runtime = std::make_unique<CudaRuntime>(cuda_, std::move(runtime), FakeCuda::device, pick(2) == 0);
    }
    auto tier = std::make_unique<SlowTier>(geometry_, int64_t{config_.num_chunks} * (config_.chunk_tokens / config_.slot_tokens), *sim_, pick(3) * 40);
    engine_ = std::make_unique<Engine>(config_, geometry_, table_, std::move(tier), std::move(runtime), options);
    closes_early_ = pick(8) == 0;
  }

  // Serves what the callers ask for; returns the first thing that is wrong, or nothing.
  std::string run(int callers, int steps) {
    for (int i = 0; i < callers; ++i) sim_->spawn("caller " + std::to_string(i + 1), [this, steps, i] { caller(steps, closes_early_ && i == 0); });
    sim_->run_dry();
    engine_->drain();
    expect(sim_->problem().empty(), sim_->problem());
    expect(tally_.wrong == 0, "attention read " + std::to_string(tally_.wrong) + " wrong values");
    check_index();
    engine_->clear();
    const Gauges g = engine_->index().gauges();
    expect(g.pages_free == g.pages_total, "pages leaked");
    expect(g.region_pages_free == g.region_pages_total, "spans of the onload region leaked");
    expect(g.slots_free == g.slots_total, "slots leaked");
    expect(g.slots_largest_free * config_.slot_tokens == config_.chunk_tokens, "freed buddies did not merge");
    expect(g.open_batches == 0 && g.transfers_in_flight == 0 && g.pending_offload_tokens == 0 && g.entries == 0, "batches, transfers or users leaked");
    engine_->close();
    return problem_;
  }

  const Tally& tally() const { return tally_; }
  Counters counters() const { return engine_->index().counters(); }

 private:
  static constexpr int32_t kLayers = 2;
  static constexpr int64_t kRowK = 8, kRowV = 16;

  struct User {
    std::vector<uint64_t> history;
    uint64_t generation = 1, context_key = 1;
  };

  // One row as the model sees it.
  struct Row {
    std::vector<uint64_t> digests;  // per token, of everything up to it
    BatchRow granted;
    std::vector<PageId> pages, cached_pages;  // written, read
  };
  using Rows = std::shared_ptr<std::vector<Row>>;

  struct Serving {
    Rows rows = std::make_shared<std::vector<Row>>();
    std::shared_ptr<uint64_t> mismatches = std::make_shared<uint64_t>(0);
    std::vector<std::vector<uint64_t>> hashes;
    std::vector<RowRequest> requests;
    std::set<std::pair<EntryId, uint32_t>> writes;
    int32_t next_layer = 0;
    bool gives_up = false;
    Engine::OpenBatch open;
  };

  int32_t pick(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint64_t>(n)); }

  static uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t x = (a ^ (b + 0x9e3779b97f4a7c15ull)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 29)) * 0x94d049bb133111ebull;
    return x ^ (x >> 32);
  }

  void expect(bool holds, const std::string& what) {
    if (!holds && problem_.empty()) problem_ = what;
  }

  void check_index() {
    const std::string broken = engine_->index().check();
    expect(broken.empty(), broken);
    const int64_t pending = engine_->index().gauges().pending_offload_tokens;
    expect(pending >= 0 && pending <= config_.offload_quota_tokens, "more tokens are queued for offload than the quota allows");
  }

  // ---- what users do ----------------------------------------------------------------------------------------------

  // Without hashes the content of a position never changes, as callers promise; with them anything may happen.
  void grow(size_t id, int32_t tokens) {
    User& user = users_[id];
    for (; tokens > 0 && static_cast<int32_t>(user.history.size()) < longest_; --tokens)
      user.history.push_back(hashed_ ? ++next_token_ : mix(mix(id, user.generation), user.history.size()));
  }

  void visit(size_t id) {
    User& user = users_[id];
    auto& history = user.history;
    const int32_t move = pick(18);
    switch (!hashed_ && (move == 1 || move == 2) ? 17 : move) {
      case 0:
        history.resize(history.size() - std::min<size_t>(history.size(), 1 + pick(longest_)));
        break;
      case 1:
        if (!history.empty()) history[pick(static_cast<int32_t>(history.size()))] = ++next_token_;
        break;
      case 2:
        history.erase(history.begin(), history.begin() + std::min<size_t>(history.size(), pick(4)));
        break;
      case 3:
        history.resize(history.size() - std::min<size_t>(history.size(), 1 + pick(4)));
        grow(id, 1 + pick(8));
        break;
      case 4:
        if (context_ > 0) ++user.context_key;
        break;
      default:
        grow(id, pick(2 * config_.page_size + 2));
    }
  }

  // ---- the model --------------------------------------------------------------------------------------------------

  std::byte* at(int32_t layer, PageId page, int32_t token, bool is_v) const {
    const int32_t row = token % config_.page_size;
    return table_.page(layer, page) + (is_v ? config_.page_size * kRowK + row * kRowV : row * kRowK);
  }

  Accesses tokens_of(const Rows& rows, int32_t layer, bool write) const {
    Accesses out;
    for (const Row& r : *rows) {
      const int32_t first = write ? r.granted.cached : 0;
      const int32_t end = !write ? r.granted.cached : r.granted.stores ? r.granted.tokens : 0;
      for (int32_t t = first; t < end; ++t)
        for (const bool is_v : {false, true})
          out.push_back({at(layer, (write ? r.pages : r.cached_pages)[t / config_.page_size], t, is_v), is_v ? kRowV : kRowK, write});
    }
    return out;
  }

  template <class Visit>
  void for_each_value(const Rows& rows, int32_t layer, bool write, Visit visit) const {
    for (const Row& r : *rows) {
      const int32_t first = write ? r.granted.cached : 0;
      const int32_t end = !write ? r.granted.cached : r.granted.stores ? r.granted.tokens : 0;
      for (int32_t t = first; t < end; ++t)
        for (const bool is_v : {false, true})
          visit(at(layer, (write ? r.pages : r.cached_pages)[t / config_.page_size], t, is_v), mix(r.digests[t], layer * 2 + is_v));
    }
  }

  void attend_and_append(Stream& compute, const Serving& s, int32_t layer) {
    const Rows rows = s.rows;
    compute.launch(
        "attention",
        [this, rows, layer, mismatches = s.mismatches] {
          for_each_value(rows, layer, false, [&](const std::byte* from, uint64_t want) {
            uint64_t got;
            std::memcpy(&got, from, sizeof got);
            *mismatches += got != want;
            ++tally_.reads;
          });
        },
        [&] { return tokens_of(rows, layer, false); });
    compute.launch(
        "append",
        [this, rows, layer] {
          for_each_value(rows, layer, true, [](std::byte* to, uint64_t value) { std::memcpy(to, &value, sizeof value); });
        },
        [&] { return tokens_of(rows, layer, true); });
  }

  // ---- one batch --------------------------------------------------------------------------------------------------

  std::unique_ptr<Serving> begin(Stream& compute) {
    auto s = std::make_unique<Serving>();
    const int32_t context = pick(20) == 0 ? 0 : context_;
    const uint32_t version = version_ + (pick(5) == 0);
    const size_t n = 1 + pick(4) * pick(2);
    s->hashes.reserve(n);
    for (size_t i = 0; i < n; ++i) {
      const size_t id = pick(static_cast<int32_t>(users_.size()));
      User& user = users_[id];
      visit(id);
      std::vector<uint64_t> history = user.history;
      if (pick(12) == 0 && !history.empty()) history.resize(history.size() - pick(static_cast<int32_t>(history.size())));
      Row row;
      uint64_t digest = mix(mix(id, version), context);
      if (context > 0) digest = mix(digest, user.context_key);
      for (int32_t t = 0; t < context; ++t) row.digests.push_back(digest = mix(digest, t));
      for (const uint64_t token : history) row.digests.push_back(digest = mix(digest, token));
      s->rows->push_back(std::move(row));
      s->requests.push_back({static_cast<int64_t>(id) - 1, static_cast<int32_t>(context + history.size()), context > 0 ? user.context_key : 0, nullptr});
      s->hashes.push_back(std::move(history));
      // An empty row has no hashes to point at.
      if (hashed_) s->requests.back().token_hashes = s->hashes.back().empty() ? &kNothing : s->hashes.back().data();
    }
    s->gives_up = pick(10) < quitters_;
    engine_->begin(s->requests, context, version, s->open, &compute);
    if (problem_.empty()) take_grant(*s);
    return s;
  }

  void take_grant(Serving& s) {
    const Batch& batch = s.open.batch;
    std::set<PageId> written;
    for (size_t i = 0; i < batch.rows.size(); ++i) {
      const BatchRow& granted = batch.rows[i];
      Row& row = (*s.rows)[i];
      row.granted = granted;
      row.pages.assign(batch.pages.begin() + granted.first_page, batch.pages.begin() + granted.first_page + granted.num_pages);
      for (int32_t p = 0; p * config_.page_size < granted.cached; ++p) row.cached_pages.push_back(batch.cached_page(granted, p));
      expect(granted.cached <= granted.tokens, "more tokens are cached than were asked for");
      const int32_t covered = granted.stores ? granted.tokens : granted.cached;
      if (granted.num_pages * config_.page_size < covered) {
        expect(false, "a row has fewer pages than tokens in them");
        row.granted.cached = row.granted.tokens = 0;
      }
      for (size_t j = 0; j < batch.rows.size(); ++j)
        expect(!granted.stores || s.requests[j].user != s.requests[i].user || batch.rows[j].tokens <= granted.tokens,
               "of two rows of one user the shorter one is stored");
      if (!granted.stores) continue;
      for (int32_t p = granted.cached / config_.page_size; p < granted.num_pages; ++p)
        expect(written.insert(row.pages[p]).second, "two rows of a batch store to one page");
      const std::pair<EntryId, uint32_t> key{granted.entry, granted.epoch};
      s.writes.insert(key);
      expect(writing_.insert(key).second, "two batches store to one user at once");
    }
  }

  // False once it is over.
  bool advance(Stream& compute, Serving& s) {
    const bool good = engine_->wait(s.open, s.next_layer);
    attend_and_append(compute, s, s.next_layer);
    const bool stops = !good || (s.gives_up && s.next_layer == 0);
    if (!stops && ++s.next_layer < kLayers) return true;
    for (const auto& key : s.writes) writing_.erase(key);
    const std::vector<LoadPtr> loads = s.open.loads;
    if (!stops)
      engine_->commit(s.open);
    else if (pick(3) > 0)
      engine_->abort(s.open);  // else it is dropped unfinished
    // Judged when the stream has run: a batch whose onload failed never counts.
    compute.launch(
        "judge",
        [this, mismatches = s.mismatches, loads] {
          for (const LoadPtr& load : loads)
            if (load->failed) {
              ++tally_.failed;
              return;
            }
          tally_.wrong += *mismatches;
          ++tally_.committed;
        },
        nullptr);
    return false;
  }

  // All or nothing: a row that can never have its pages must not cost others theirs.
  void ask_for_too_much() {
    Index& index = engine_->index();
    const uint64_t before = index.counters().device_evicted_pages;
    const RowRequest request{1'000'000, (config_.num_pages + 1) * config_.page_size, 0, nullptr};
    Batch batch;
    std::vector<TransferTask> onloads;
    index.begin(std::span(&request, 1), 0, version_, batch, onloads);
    index.abort(batch, false);
    expect(index.counters().device_evicted_pages == before, "pages were evicted for a row that gets none");
  }

  // ---- callers ----------------------------------------------------------------------------------------------------

  // Up to two batches open at once, their layers interleaved, far ahead of the stream or not.
  void caller(int steps, bool closes) {
    std::unique_ptr<Stream> compute;
    if (cuda_ != nullptr)
      compute = std::make_unique<FakeCompute>(static_cast<CudaRuntime&>(engine_->runtime()), *cuda_);
    else if (pick(4) == 0)
      compute = std::make_unique<InlineStream>(*sim_);
    else
      compute = sim_->make_stream("compute");
    std::vector<std::unique_ptr<Serving>> open;
    try {
      for (int step = 0; step < steps && problem_.empty() && sim_->problem().empty(); ++step) {
        if (faults_ && pick(8) == 0) (pick(2) == 0 ? engine_->runtime().faults.onload_copy : engine_->runtime().faults.offload_copy) = 1 + pick(4);
        if (faults_ && cuda_ != nullptr && pick(4) == 0) refuse_a_call();
        if (!open.empty() && (open.size() == 2 || pick(3) > 0)) {
          const size_t i = pick(static_cast<int32_t>(open.size()));
          if (!advance(*compute, *open[i])) open.erase(open.begin() + i);
        } else if (pick(4) > 0) {
          open.push_back(begin(*compute));
        } else {
          operate(*compute);
        }
        check_index();
        if (pick(64) < calm_) engine_->drain();
      }
      for (auto& s : open)
        while (problem_.empty() && advance(*compute, *s)) {
        }
      if (closes) engine_->close();
    } catch (const std::runtime_error& error) {
      expect(closes_early_ && error.what() == std::string("the cache is closed"), error.what());
      for (auto& s : open)
        for (const auto& key : s->writes) writing_.erase(key);
    }
    open.clear();
  }

  // With an error that the device survives.
  void refuse_a_call() {
    FakeCuda::Fault* const faults[] = {&cuda_->copy_fault,   &cuda_->query_fault, &cuda_->create_event_fault,
                                       &cuda_->record_fault, &cuda_->wait_fault,  &cuda_->allocate_fault};
    *faults[pick(6)] = {1 + pick(6), CudaApi::kOutOfMemory};
  }

  void operate(Stream& compute) {
    const int32_t id = pick(static_cast<int32_t>(users_.size()));
    const int64_t name = id - 1;
    switch (pick(16)) {
      case 0:
      case 1:
        // The old events are gone, others took their place.
        ++users_[id].generation;
        users_[id].history.clear();
        engine_->evict(std::span(&name, 1));
        break;
      case 2:
        if (pick(3) == 0) engine_->flush();
        break;
      case 3:
        if (pick(4) == 0) engine_->clear();
        break;
      case 4:
        if (pick(3) == 0) engine_->index().retire_version(version_++);
        break;
      case 5:
        ask_for_too_much();
        break;
      case 6:
      case 7:
      case 8:
        if (!compute.is_inline()) {
          const EventPtr end = engine_->runtime().make_event();
          compute.record(end);
          engine_->runtime().synchronize(end);
        }
        break;
      default:
        engine_->prefetch(std::span(&name, 1), version_);
    }
  }

  static constexpr uint64_t kNothing = 0;

  IndexConfig config_;
  Geometry geometry_;
  std::mt19937_64 random_;
  const bool faults_;
  bool hashed_ = false, closes_early_ = false;
  int32_t context_ = 0, longest_ = 0;
  int32_t quitters_ = 0;  // of 10 batches, how many are given up
  int32_t calm_ = 0;  // of 64 steps, how many let the copies catch up
  uint32_t version_ = 1;
  uint64_t next_token_ = 0;
  std::vector<User> users_;
  std::set<std::pair<EntryId, uint32_t>> writing_;  // entries, under their epoch, that an open batch stores to
  Tally tally_;
  std::string problem_;
  std::vector<std::byte> memory_;
  DeviceTable table_;
  SimRuntime* sim_ = nullptr;  // the engine owns it
  std::shared_ptr<FakeCuda> cuda_;  // null unless the device is one of CUDA
  std::unique_ptr<Engine> engine_;
};

}  // namespace mtserve
