// One onload in flight, seen by every batch that reads the user: which layers are issued, which have arrived.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "runtime/runtime.h"

namespace mtserve {

class Load {
 public:
  // `scattered`: what lands in the onload region goes on into pages.
  Load(Runtime& runtime, int32_t num_layers, bool scattered) {
    for (int32_t layer = 0; layer < num_layers; ++layer) {
      issued.push_back(runtime.make_latch());
      ready.push_back(runtime.make_event());
      landed.push_back(scattered ? runtime.make_event() : ready.back());
    }
  }

  std::vector<std::unique_ptr<Latch>> issued;  // per layer: the events below are recorded
  std::vector<EventPtr> ready;                 // per layer: keys and values are where they are to stay
  std::vector<EventPtr> landed;                // per layer: they are where the copy engine puts them
  std::atomic<bool> failed{false};             // some copy failed; events still pass, so that nobody hangs
};

using LoadPtr = std::shared_ptr<Load>;

}  // namespace mtserve
