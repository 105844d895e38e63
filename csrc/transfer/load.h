// One onload in flight, seen by every batch that reads the user: which layers have arrived.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace mtserve {

class Load {
 public:
  void layer_arrived() {
    {
      std::lock_guard lock(mutex_);
      ++layers_;
    }
    changed_.notify_all();
  }

  void fail() {
    {
      std::lock_guard lock(mutex_);
      failed_ = true;
    }
    changed_.notify_all();
  }

  // Blocks until the layer has arrived; false when it never will.
  bool wait(int32_t layer) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return layers_ > layer || failed_; });
    return layers_ > layer;
  }

  bool failed() {
    std::lock_guard lock(mutex_);
    return failed_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int32_t layers_ = 0;
  bool failed_ = false;
};

}  // namespace mtserve
