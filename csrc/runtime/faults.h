// Where injected faults strike.
#pragma once

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "runtime/runtime.h"

namespace mtserve {

// Throws when this is the copy that was chosen to fail.
inline void strike(Faults& faults, std::atomic<int64_t>& countdown) {
  if (const int64_t delay = faults.delay_us.load(std::memory_order_relaxed); delay > 0)
    std::this_thread::sleep_for(std::chrono::microseconds(delay));
  if (countdown.load(std::memory_order_relaxed) > 0 && countdown.fetch_sub(1) == 1)
    throw std::runtime_error("injected copy failure");
}

}  // namespace mtserve
