// Host buffers of one slice each, used in turn (paper 4.2: a pair of pinned buffers of chunk size).
#pragma once

#include <memory>

#include "runtime/runtime.h"

namespace mtserve {

struct StagingBuffer {
  std::unique_ptr<std::byte[]> bytes;
  EventPtr free;  // recorded when the last user of the buffer is queued; null before the first use
};

inline StagingBuffer make_staging(int64_t bytes) {
  return {std::unique_ptr<std::byte[]>(new std::byte[static_cast<size_t>(bytes)]), nullptr};
}

}  // namespace mtserve
