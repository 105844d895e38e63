// The runtime of the CPU build: a stream is a thread with a queue, an event is an event, the device tier is memory.
#pragma once

#include "runtime/runtime.h"

namespace mtserve {

class ThreadsRuntime : public Runtime {
 public:
  std::unique_ptr<Stream> make_stream(const std::string& name) override;
  std::unique_ptr<Stream> make_copy_stream(const std::string& name) override;
  std::unique_ptr<Stream> make_host_thread(const std::string& name) override;
  EventPtr make_event() override;
  std::unique_ptr<Latch> make_latch() override;
  void synchronize(const EventPtr& event) override;
  void touch(const char*, const AccessList&) override {}

  // The caller's own thread as a stream: work runs inside the call.
  std::unique_ptr<Stream> make_caller_stream();
};

}  // namespace mtserve
