// Streams on threads: order, and that no work is left lying however the thread looks for it.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "runtime/threads.h"

using namespace mtserve;
using std::chrono::milliseconds;

namespace {

// Waits for everything queued so far; false when that takes longer than any thread may be late.
bool arrives(ThreadsRuntime& runtime, Stream& stream) {
  const EventPtr event = runtime.make_event();
  stream.record(event);
  for (int turn = 0; turn < 5000; ++turn) {
    if (event->done()) return true;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return false;
}

void work_arrives_in_order() {
  for (const int background : {0, 1, 2}) {
    ThreadsRuntime runtime;
    std::unique_ptr<Stream> stream = runtime.make_stream("test");
    if (background > 0) stream->stay_in_background(background == 2);
    std::vector<int> seen;
    // At once, while the thread still looks for work by itself, and after it has gone to sleep.
    for (const milliseconds pause : {milliseconds(0), milliseconds(0), milliseconds(3), milliseconds(1500), milliseconds(20)}) {
      std::this_thread::sleep_for(pause);
      const size_t before = seen.size();
      for (int i = 0; i < 10; ++i) stream->launch("push", [&seen] { seen.push_back(static_cast<int>(seen.size())); }, nullptr);
      CHECK(arrives(runtime, *stream));
      CHECK(seen.size() == before + 10);
    }
    for (size_t i = 0; i < seen.size(); ++i) CHECK(seen[i] == static_cast<int>(i));
  }
}

void queued_work_runs_before_the_end() {
  for (const int background : {0, 1, 2}) {
    std::atomic<int> done{0};
    {
      ThreadsRuntime runtime;
      std::unique_ptr<Stream> stream = runtime.make_stream("test");
      if (background > 0) stream->stay_in_background(background == 2);
      std::this_thread::sleep_for(milliseconds(2));
      for (int i = 0; i < 100; ++i) stream->launch("count", [&done] { ++done; }, nullptr);
    }
    CHECK(done == 100);
  }
}

void copy_streams_run_on_the_thread_that_launches() {
  ThreadsRuntime runtime;
  std::unique_ptr<Stream> issuer = runtime.make_host_thread("issuer"), copies = runtime.make_copy_stream("copies");
  const EventPtr go = runtime.make_event(), copied = runtime.make_event();
  std::unique_ptr<Stream> other = runtime.make_stream("other");
  std::thread::id ran, issued;
  bool gone = false;
  other->launch("later", [&gone] { std::this_thread::sleep_for(milliseconds(5)); gone = true; }, nullptr);
  other->record(go);
  bool after = false;
  issuer->launch(
      "issue",
      [&] {
        issued = std::this_thread::get_id();
        copies->wait(go);
        copies->launch("copy", [&] { ran = std::this_thread::get_id(), after = gone; }, nullptr);
        copies->record(copied);
      },
      nullptr);
  CHECK(arrives(runtime, *issuer));
  CHECK(copied->done());
  CHECK(ran == issued);
  CHECK(after);
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"work arrives in order", work_arrives_in_order},
                    {"queued work runs before the end", queued_work_runs_before_the_end},
                    {"copy streams run on the thread that launches", copy_streams_run_on_the_thread_that_launches}});
}
