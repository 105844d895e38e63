// Stream, Event, Latch: what the pipelines are written against, once, for every runtime.
//
// A *stream* runs its work in order, apart from the host. A *host thread* is a stream whose work may itself use the
// runtime: launch on other streams, wait for events. An *event* marks a moment of a stream; a *latch* a moment of the
// host. Memory is handed over by events and latches alone: the sim runtime checks just that.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/copy.h"
#include "runtime/timeline.h"

namespace mtserve {

// Bytes that an operation reads or writes.
struct Access {
  const std::byte* begin = nullptr;
  int64_t bytes = 0;
  bool write = false;
};
using Accesses = std::vector<Access>;
using AccessList = std::function<Accesses()>;

class Event {
 public:
  virtual ~Event() = default;
  // Forgets the last record. Nobody may be waiting.
  virtual void reset() = 0;
  // True when the marked moment has passed. Throws std::logic_error unless recorded since the last reset: on CUDA an
  // unrecorded event silently counts as done, which no runtime here may copy.
  virtual bool done() = 0;
};
using EventPtr = std::shared_ptr<Event>;  // queued work keeps what it waits for alive

class Stream {
 public:
  virtual ~Stream() = default;
  // Queues `work`, which must not throw. `name` and `accesses` are for runtimes that check; `accesses` is evaluated
  // inside the call.
  virtual void launch(const char* name, std::function<void()> work, const AccessList& accesses) = 0;
  // Queues a copy.
  virtual void copy(CopyOrder order);
  // Marks the moment when everything queued so far is done.
  virtual void record(const EventPtr& event) = 0;
  // Holds what is queued after this until the event is done. Throws std::logic_error on an unrecorded event.
  virtual void wait(const EventPtr& event) = 0;
  // True when work runs inside the call, on the caller's thread.
  virtual bool is_inline() const { return false; }
  // Nobody waits for this stream: waking it must not cost whoever wakes it the processor. `polled`: nor even the call
  // that wakes it; while it had work lately, it looks for more by itself.
  virtual void stay_in_background(bool polled = false) { (void)polled; }
};

class Latch {
 public:
  virtual ~Latch() = default;
  virtual void set() = 0;
  virtual void wait() = 0;  // blocks the calling host thread
};

// Faults to be injected, deterministic: the n-th copy from now fails. 0 means none.
struct Faults {
  std::atomic<int64_t> onload_copy{0}, offload_copy{0};
  // Microseconds that each copy is delayed.
  std::atomic<int64_t> delay_us{0};
};

class Runtime {
 public:
  virtual ~Runtime() = default;
  virtual std::unique_ptr<Stream> make_stream(const std::string& name) = 0;
  virtual std::unique_ptr<Stream> make_host_thread(const std::string& name) = 0;
  // A stream for copies that a host thread launches which has nothing else to do: it may run them itself.
  virtual std::unique_ptr<Stream> make_copy_stream(const std::string& name) { return make_stream(name); }
  virtual EventPtr make_event() = 0;
  virtual std::unique_ptr<Latch> make_latch() = 0;
  // Blocks the calling host thread until the event is done.
  virtual void synchronize(const EventPtr& event) = 0;
  // Declares what the calling host thread itself reads or writes now.
  virtual void touch(const char* name, const AccessList& accesses) = 0;
  // The calling host thread takes or gives up the lock that guards shared decisions; carries order like a latch.
  virtual void locked() {}
  virtual void unlocking() {}
  // Host memory that copy engines reach. Throws std::bad_alloc.
  virtual std::shared_ptr<std::byte> allocate_staging(int64_t bytes) { return allocate(bytes); }
  // Device memory, to be used on that stream alone and given back in its order. Throws std::bad_alloc.
  virtual std::shared_ptr<std::byte> allocate_on_device(int64_t bytes, Stream&) { return allocate(bytes); }
  // The first error of the device, with the call; empty while there was none. Nothing that follows it can be trusted.
  virtual std::string error() { return {}; }
  // The timeline from now on, and what it recorded, in order of time. Neither waits for a stream.
  virtual void start_timeline(size_t limit) { timeline.start(limit); }
  virtual std::vector<Timeline::Span> take_timeline() { return timeline.take(); }

  static std::shared_ptr<std::byte> allocate(int64_t bytes) {
    return {new std::byte[static_cast<size_t>(bytes)], std::default_delete<std::byte[]>()};
  }

  Faults faults;
  Timeline timeline;  // of the streams; empty in runtimes without real time
};

}  // namespace mtserve
