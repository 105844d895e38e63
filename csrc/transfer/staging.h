// Host buffers of one slice each, used in turn (paper 4.2: a pair of pinned buffers of chunk size).
#pragma once

#include <memory>

#include "runtime/runtime.h"

namespace mtserve {

struct StagingBuffer {
  std::shared_ptr<std::byte> bytes;
  EventPtr free;  // recorded when the last user of the buffer is queued; null before the first use
};

inline StagingBuffer make_staging(Runtime& runtime, int64_t bytes) { return {runtime.allocate_staging(bytes), nullptr}; }

}  // namespace mtserve
