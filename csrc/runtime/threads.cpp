#include "runtime/threads.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

namespace mtserve {

namespace {

using std::chrono::microseconds;

// Longer than it takes to be woken, short beside a layer.
constexpr microseconds kAwake{50};
// A stream that polls is late by this much at most, and goes to sleep after so many empty looks.
constexpr microseconds kPoll{1000};
constexpr int kPolls = 1000;

// Layers follow each other closely: whoever falls asleep for each is woken late for each.
template <class Waits>
void stay_awake(Waits waits) {
  const auto until = std::chrono::steady_clock::now() + kAwake;
  while (waits() && std::chrono::steady_clock::now() < until) std::this_thread::yield();  // the copy may need this very core
}

class ThreadEvent : public Event {
 public:
  void reset() override { set(State::fresh); }

  bool done() override {
    std::lock_guard lock(mutex_);
    require_recorded();
    return state_ == State::done;
  }

  void recorded() { set(State::recorded); }

  // Notifies under the lock: a waiter may destroy the event as soon as it sees it done.
  void complete() {
    std::lock_guard lock(mutex_);
    state_ = State::done;
    changed_.notify_all();
  }

  void wait_awake() {
    stay_awake([this] { return state_.load(std::memory_order_relaxed) == State::recorded; });
    wait();
  }

  void wait() {
    std::unique_lock lock(mutex_);
    require_recorded();
    changed_.wait(lock, [this] { return state_ == State::done; });
  }

  void check_recorded() {
    std::lock_guard lock(mutex_);
    require_recorded();
  }

 private:
  enum class State { fresh, recorded, done };

  void set(State state) {
    std::lock_guard lock(mutex_);
    state_ = state;
  }

  void require_recorded() const {
    if (state_ == State::fresh) throw std::logic_error("waiting on an event that was not recorded since its reset");
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<State> state_ = State::fresh;  // changes under the lock
};

class ThreadStream : public Stream {
 public:
  ThreadStream(const std::string& name, Timeline& timeline) : name_(name), timeline_(timeline), thread_([this] { run(); }) {
    pthread_setname_np(thread_.native_handle(), ("mts-" + name).substr(0, 15).c_str());
  }

  // Runs what was queued, then joins.
  ~ThreadStream() override {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    ready_.notify_one();
    thread_.join();
  }

  void launch(const char* name, std::function<void()> work, const AccessList&) override {
    if (!timeline_.is_on()) return push(std::move(work));
    push([this, name, work = std::move(work)] {
      const int64_t begin = Timeline::now();
      work();
      timeline_.add(name_, name, begin);
    });
  }

  void stay_in_background(bool polled) override {
#ifdef SCHED_BATCH
    // A batch thread that wakes up preempts nobody; a wish that may be refused.
    const sched_param none{};
    pthread_setschedparam(thread_.native_handle(), SCHED_BATCH, &none);
#endif
    std::lock_guard lock(mutex_);
    in_background_ = true;
    is_polled_ = polled;
  }

  void record(const EventPtr& event) override {
    static_cast<ThreadEvent&>(*event).recorded();
    push([event] { static_cast<ThreadEvent&>(*event).complete(); });
  }

  void wait(const EventPtr& event) override {
    static_cast<ThreadEvent&>(*event).check_recorded();
    push([event] { static_cast<ThreadEvent&>(*event).wait(); });
  }

 private:
  void push(std::function<void()> work) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
      if (is_polling_) return;
    }
    ready_.notify_one();
  }

  void run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        const auto has_work = [this] { return closing_ || !queue_.empty(); };
        is_polling_ = is_polled_;
        for (int looks = 0; is_polling_ && looks < kPolls && !has_work(); ++looks) ready_.wait_for(lock, kPoll, has_work);
        is_polling_ = false;
        if (!has_work()) {
          ready_.wait(lock, has_work);
          if (in_background_) {
            // Whoever woke this thread may have lost the processor to it: it goes first.
            lock.unlock();
            std::this_thread::sleep_for(microseconds(20));
            lock.lock();
          }
        }
        if (queue_.empty()) return;
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      work();
    }
  }

  const std::string name_;
  Timeline& timeline_;
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> queue_;
  bool closing_ = false;
  bool in_background_ = false, is_polled_ = false;
  bool is_polling_ = false;  // looks at the queue by itself before long
  std::thread thread_;
};

// Runs inside the call, on the host thread that launches.
class CopyStream : public Stream {
 public:
  CopyStream(const std::string& name, Timeline& timeline) : name_(name), timeline_(timeline) {}
  void launch(const char* name, std::function<void()> work, const AccessList&) override {
    const int64_t begin = Timeline::now();
    work();
    if (timeline_.is_on()) timeline_.add(name_, name, begin);
  }
  void record(const EventPtr& event) override { static_cast<ThreadEvent&>(*event).complete(); }
  void wait(const EventPtr& event) override { static_cast<ThreadEvent&>(*event).wait(); }
  bool is_inline() const override { return true; }

 private:
  const std::string name_;
  Timeline& timeline_;
};

class CallerStream : public Stream {
 public:
  void launch(const char*, std::function<void()> work, const AccessList&) override { work(); }
  void record(const EventPtr& event) override { static_cast<ThreadEvent&>(*event).complete(); }
  void wait(const EventPtr& event) override { static_cast<ThreadEvent&>(*event).wait_awake(); }
  bool is_inline() const override { return true; }
};

class ThreadLatch : public Latch {
 public:
  void set() override {
    std::lock_guard lock(mutex_);
    set_ = true;
    changed_.notify_all();
  }

  void wait() override {
    stay_awake([this] { return !set_.load(std::memory_order_relaxed); });
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return set_.load(); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> set_{false};  // changes under the lock
};

}  // namespace

std::unique_ptr<Stream> ThreadsRuntime::make_stream(const std::string& name) { return std::make_unique<ThreadStream>(name, timeline); }
std::unique_ptr<Stream> ThreadsRuntime::make_host_thread(const std::string& name) { return std::make_unique<ThreadStream>(name, timeline); }
std::unique_ptr<Stream> ThreadsRuntime::make_copy_stream(const std::string& name) { return std::make_unique<CopyStream>(name, timeline); }
std::unique_ptr<Stream> ThreadsRuntime::make_caller_stream() { return std::make_unique<CallerStream>(); }
EventPtr ThreadsRuntime::make_event() { return std::make_shared<ThreadEvent>(); }
std::unique_ptr<Latch> ThreadsRuntime::make_latch() { return std::make_unique<ThreadLatch>(); }
void ThreadsRuntime::synchronize(const EventPtr& event) { static_cast<ThreadEvent&>(*event).wait(); }

}  // namespace mtserve
