#include "runtime/sim.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace mtserve {

void SimRuntime::Clock::join(const Clock& other) {
  if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size());
  for (size_t i = 0; i < other.counts_.size(); ++i) counts_[i] = std::max(counts_[i], other.counts_[i]);
}

void SimRuntime::Clock::tick(size_t id) {
  if (counts_.size() <= id) counts_.resize(id + 1);
  ++counts_[id];
}

class SimEvent : public Event {
 public:
  explicit SimEvent(SimRuntime& runtime) : runtime_(runtime) {}
  void reset() override { recorded = passed = false; }
  bool done() override {
    require_recorded();
    if (passed) runtime_.current().clock.join(clock);  // seen on the host
    return passed;
  }
  void require_recorded() const {
    if (!recorded) throw std::logic_error("waiting on an event that was not recorded since its reset");
  }

  bool recorded = false, passed = false;
  SimRuntime::Clock clock;

 private:
  SimRuntime& runtime_;
};

class SimStream : public Stream {
 public:
  SimStream(SimRuntime& runtime, SimRuntime::Actor& actor) : runtime_(runtime), actor_(actor) {}
  ~SimStream() override {
    // What was queued runs first, as on every runtime.
    if (actor_.queue.empty() && !actor_.in_body) return;
    runtime_.block([this] { return actor_.queue.empty() && !actor_.in_body; });
  }

  void launch(const char* name, std::function<void()> work, const AccessList& accesses) override {
    runtime_.enqueue(actor_, {std::move(work), nullptr, false, {}, name, accesses ? accesses() : Accesses{}});
  }
  void record(const EventPtr& event) override {
    static_cast<SimEvent&>(*event).recorded = true;
    runtime_.enqueue(actor_, {{}, event, false, {}, "record", {}});
  }
  void wait(const EventPtr& event) override {
    static_cast<SimEvent&>(*event).require_recorded();
    runtime_.enqueue(actor_, {{}, event, true, {}, "wait", {}});
  }

 private:
  SimRuntime& runtime_;
  SimRuntime::Actor& actor_;
};

class SimLatch : public Latch {
 public:
  explicit SimLatch(SimRuntime& runtime) : runtime_(runtime) {}
  void set() override {
    SimRuntime::Actor& actor = runtime_.current();
    actor.clock.tick(actor.id);
    clock_.join(actor.clock);
    set_ = true;
    runtime_.maybe_switch();
  }
  void wait() override {
    runtime_.block([this] { return set_; });
    runtime_.current().clock.join(clock_);
  }

 private:
  SimRuntime& runtime_;
  SimRuntime::Clock clock_;
  bool set_ = false;
};

SimRuntime::SimRuntime(uint64_t seed) : random_(seed) {
  Actor& main = add("caller", true);
  main.in_body = true;
  baton_ = &main;
}

SimRuntime::~SimRuntime() {
  run_dry();
  closing_ = true;
  for (auto& actor : actors_)
    if (actor->thread.joinable()) {
      block([&] { return actor->finished; });
      actor->thread.join();
    }
}

SimRuntime::Actor& SimRuntime::add(const std::string& name, bool is_host) {
  actors_.push_back(std::make_unique<Actor>());
  Actor& actor = *actors_.back();
  actor.name = name;
  actor.id = actors_.size() - 1;
  actor.is_host = is_host;
  actor.pace = uint64_t{1} << random_() % 6;
  return actor;
}

std::unique_ptr<Stream> SimRuntime::make_stream(const std::string& name) {
  return std::make_unique<SimStream>(*this, add(name, false));
}

std::unique_ptr<Stream> SimRuntime::make_host_thread(const std::string& name) {
  Actor& actor = add(name, true);
  actor.ready = [this, &actor] { return !actor.queue.empty() || closing_; };
  actor.thread = std::thread([this, &actor] { host_loop(actor); });
  return std::make_unique<SimStream>(*this, actor);
}

EventPtr SimRuntime::make_event() { return std::make_shared<SimEvent>(*this); }
std::unique_ptr<Latch> SimRuntime::make_latch() { return std::make_unique<SimLatch>(*this); }

void SimRuntime::spawn(const std::string& name, std::function<void()> body) {
  Actor& actor = add(name, true);
  actor.clock = current().clock;
  actor.in_body = true;
  actor.ready = [] { return true; };
  actor.thread = std::thread([this, &actor, body = std::move(body)] {
    wait_for_baton(actor);
    body();
    actor.finished = true;
    block([] { return false; });
  });
}

void SimRuntime::run_dry() {
  const Actor* me = baton_;
  block([this, me] {
    return std::all_of(actors_.begin(), actors_.end(),
                       [me](const auto& a) { return a.get() == me || a->finished || (a->queue.empty() && !a->in_body); });
  });
}

void SimRuntime::synchronize(const EventPtr& event) {
  auto& e = static_cast<SimEvent&>(*event);
  e.require_recorded();
  block([&e] { return e.passed; });
  current().clock.join(e.clock);
}

void SimRuntime::touch(const char* name, const AccessList& accesses) {
  Actor& actor = current();
  actor.clock.tick(actor.id);
  check(actor, name, accesses());
}

void SimRuntime::locked() { current().clock.join(lock_clock_); }

void SimRuntime::unlocking() {
  Actor& actor = current();
  actor.clock.tick(actor.id);
  lock_clock_.join(actor.clock);
}

// The stream whose work runs, else the host thread that holds the baton.
SimRuntime::Actor& SimRuntime::current() { return device_ != nullptr ? *device_ : *baton_; }

void SimRuntime::enqueue(Actor& actor, Item item) {
  Actor& from = current();
  from.clock.tick(from.id);
  item.clock = from.clock;
  actor.queue.push_back(std::move(item));
  maybe_switch();
}

bool SimRuntime::head_is_runnable(const Actor& actor) const {
  if (actor.is_host || actor.queue.empty()) return false;
  const Item& head = actor.queue.front();
  return !head.is_wait || static_cast<SimEvent&>(*head.event).passed;
}

void SimRuntime::run_head(Actor& actor) {
  ++steps_;
  Item item = std::move(actor.queue.front());
  actor.queue.pop_front();
  actor.clock.join(item.clock);
  actor.clock.tick(actor.id);
  if (item.event != nullptr) {
    auto& event = static_cast<SimEvent&>(*item.event);
    if (item.is_wait) {
      actor.clock.join(event.clock);
    } else {
      event.clock = actor.clock;
      event.passed = true;
    }
    return;
  }
  check(actor, item.name, item.accesses);
  if (!actor.is_host) device_ = &actor;
  item.work();
  device_ = nullptr;
}

void SimRuntime::block(const std::function<bool()>& ready) {
  Actor& me = *baton_;
  for (;;) {
    std::vector<Actor*> candidates;
    for (const auto& actor : actors_) {
      if (actor.get() == &me ? ready() : actor->is_host && !actor->finished && actor->ready && actor->ready())
        candidates.push_back(actor.get());
      else if (head_is_runnable(*actor))
        candidates.push_back(actor.get());
    }
    if (candidates.empty()) fail("deadlock: nothing can run");
    uint64_t sum = 0;
    for (const Actor* candidate : candidates) sum += candidate->pace;
    uint64_t draw = random_() % sum;
    size_t at = 0;
    while (draw >= candidates[at]->pace) draw -= candidates[at++]->pace;
    Actor& chosen = *candidates[at];
    if (&chosen == &me) return;
    if (!chosen.is_host) {
      run_head(chosen);
      continue;
    }
    me.ready = ready;
    {
      std::lock_guard lock(mutex_);
      baton_ = &chosen;
      baton_moved_.notify_all();
    }
    if (me.finished) return;  // its thread ends here
    wait_for_baton(me);
    return;  // whoever handed the baton back saw that `ready` holds
  }
}

// Lets others run for a while, or not: callers far ahead of the device and devices far ahead of it both happen.
void SimRuntime::maybe_switch() {
  if (device_ != nullptr) return;
  while (random_() % 3 == 0) block([] { return true; });
}

void SimRuntime::wait_for_baton(Actor& actor) {
  std::unique_lock lock(mutex_);
  baton_moved_.wait(lock, [&] { return baton_ == &actor; });
}

void SimRuntime::host_loop(Actor& actor) {
  wait_for_baton(actor);
  for (;;) {
    if (actor.queue.empty() && closing_) break;
    if (actor.queue.empty()) {
      block([&] { return !actor.queue.empty() || closing_; });
      continue;
    }
    actor.in_body = true;
    if (const Item& head = actor.queue.front(); head.is_wait) {
      const EventPtr event = head.event;
      block([&event] { return static_cast<SimEvent&>(*event).passed; });
    }
    run_head(actor);
    actor.in_body = false;
  }
  actor.finished = true;
  block([] { return false; });
}

void SimRuntime::check(Actor& actor, const char* name, const Accesses& accesses) {
  for (const Access& access : accesses) {
    if (access.begin == nullptr || access.bytes == 0) continue;
    const std::byte* begin = access.begin;
    const std::byte* end = begin + access.bytes;
    size_t kept = 0;
    for (size_t i = 0; i < past_.size(); ++i) {
      const Past& p = past_[i];
      bool superseded = false;
      if (p.begin < end && begin < p.end && (p.write || access.write)) {
        const bool ordered = p.actor == actor.id || p.count <= actor.clock.at(p.actor);
        if (!ordered && problem_.empty())
          problem_ = "unordered: " + std::string(p.name) + " (" + actors_[p.actor]->name + ", " + (p.write ? "write" : "read") +
                     ") and " + name + " (" + actor.name + ", " + (access.write ? "write" : "read") + ")";
        // Whatever is ordered after this write is ordered after what it covers.
        superseded = access.write && begin <= p.begin && p.end <= end;
      }
      if (!superseded) past_[kept++] = p;
    }
    past_.resize(kept);
    past_.push_back({begin, end, access.write, actor.id, actor.clock.at(actor.id), name});
  }
}

void SimRuntime::fail(const std::string& what) {
  std::fprintf(stderr, "sim runtime: %s\n", what.c_str());
  for (const auto& actor : actors_)
    std::fprintf(stderr, "  %s: %zu queued%s%s\n", actor->name.c_str(), actor->queue.size(), actor->in_body ? ", inside" : "",
                 actor->finished ? ", finished" : "");
  std::abort();
}

}  // namespace mtserve
