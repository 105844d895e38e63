// When each piece of a stream's work ran: for pictures of what overlapped with what. Off until somebody asks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace mtserve {

class Timeline {
 public:
  struct Span {
    std::string stream;
    const char* name = "";  // a literal
    int64_t begin = 0, end = 0;  // nanoseconds of the steady clock
  };

  // At most `limit` spans are kept, the first ones.
  void start(size_t limit) {
    std::lock_guard lock(mutex_);
    spans_.clear();
    limit_ = limit;
    on_ = limit > 0;
  }

  // What was recorded; recording ends.
  std::vector<Span> take() {
    std::lock_guard lock(mutex_);
    on_ = false;
    return std::exchange(spans_, {});
  }

  bool is_on() const { return on_.load(std::memory_order_relaxed); }

  static int64_t now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

  void add(const std::string& stream, const char* name, int64_t begin) {
    const int64_t end = now();
    std::lock_guard lock(mutex_);
    if (on_ && spans_.size() < limit_) spans_.push_back({stream, name, begin, end});
  }

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  size_t limit_ = 0;
  std::vector<Span> spans_;
};

}  // namespace mtserve
