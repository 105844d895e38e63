// The runtime of the ordering tests: one thing runs at a time, in any order that queues, events and latches allow.
//
// A seeded scheduler picks what runs next. Every stream and host thread carries a vector clock that launches, events,
// latches and the decision lock hand on; an access that conflicts with an earlier one is an error unless a path of
// these orders the two. Work really runs, so that bytes can be compared as well.
//
// Host threads are real threads that pass a baton. The thread that builds the runtime is one of them; further callers
// are added with `spawn`.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "runtime/runtime.h"

namespace mtserve {

class SimRuntime : public Runtime {
 public:
  explicit SimRuntime(uint64_t seed);
  ~SimRuntime() override;

  std::unique_ptr<Stream> make_stream(const std::string& name) override;
  std::unique_ptr<Stream> make_host_thread(const std::string& name) override;
  EventPtr make_event() override;
  std::unique_ptr<Latch> make_latch() override;
  void synchronize(const EventPtr& event) override;
  void touch(const char* name, const AccessList& accesses) override;
  void locked() override;
  void unlocking() override;

  // A further caller; runs interleaved with everything else.
  void spawn(const std::string& name, std::function<void()> body);
  // Runs everything that is queued and lets every caller finish.
  void run_dry();

  // The first unordered pair of accesses, or the first deadlock; empty when there was none.
  const std::string& problem() const { return problem_; }
  uint64_t steps() const { return steps_; }

  class Clock {
   public:
    void join(const Clock& other);
    void tick(size_t id);
    uint32_t at(size_t id) const { return id < counts_.size() ? counts_[id] : 0; }

   private:
    std::vector<uint32_t> counts_;
  };

 private:
  friend class SimStream;
  friend class SimEvent;
  friend class SimLatch;

  struct Item {
    std::function<void()> work;  // empty for waits
    EventPtr event;              // to be recorded or waited for
    bool is_wait = false;
    Clock clock;                 // of the host when it was queued
    const char* name = "";
    Accesses accesses;
  };
  struct Actor {
    std::string name;
    size_t id = 0;
    Clock clock;
    bool is_host = false;
    uint64_t pace = 1;                  // how often it is chosen, relative to others
    bool finished = false;
    bool in_body = false;               // a host thread that is inside a work item
    std::function<bool()> ready;        // host: may go on when true
    std::deque<Item> queue;
    std::thread thread;
  };
  struct Past {
    const std::byte* begin;
    const std::byte* end;
    bool write;
    size_t actor;
    uint32_t count;
    const char* name;
  };

  Actor& add(const std::string& name, bool is_host);
  Actor& current();
  void enqueue(Actor& actor, Item item);
  bool head_is_runnable(const Actor& actor) const;
  void run_head(Actor& actor);
  void block(const std::function<bool()>& ready);  // the current host goes on when `ready`
  void maybe_switch();
  void host_loop(Actor& actor);
  void wait_for_baton(Actor& actor);
  void check(Actor& actor, const char* name, const Accesses& accesses);
  void fail(const std::string& what);

  std::mutex mutex_;  // only hands the baton over
  std::condition_variable baton_moved_;
  Actor* baton_ = nullptr;
  Actor* device_ = nullptr;  // stream whose work runs right now
  std::vector<std::unique_ptr<Actor>> actors_;
  std::vector<Past> past_;
  Clock lock_clock_;
  std::mt19937_64 random_;
  std::string problem_;
  uint64_t steps_ = 0;
  bool closing_ = false;
};

}  // namespace mtserve
