// Storage below the device tier. The index decides which block holds what; a tier only keeps the bytes.
#pragma once

#include <span>

#include "index/types.h"
#include "tiers/geometry.h"

namespace mtserve {

// Guarantees: `read` returns what the last `write` of the same rows put there, until the block is dropped. Calls for
// different blocks or layers, and reads of one block, may run at the same time; the index's pins keep a block's writers
// apart from its readers. Both throw when the bytes could not be moved whole.
class Tier {
 public:
  virtual ~Tier() = default;

  // Bytes that can be held.
  virtual int64_t capacity() const = 0;
  // A block is about to be written for the first time.
  virtual void reserve(Block block) = 0;
  // One layer's rows of a block, from or to device pages.
  virtual void write(Block block, int32_t layer, std::span<const PageRows> rows) = 0;
  virtual void read(Block block, int32_t layer, std::span<const PageRows> rows) = 0;
  // Where a page of a block lies, for tiers that are memory; null otherwise. Whoever copies there by itself needs neither
  // `write` nor `read`.
  virtual std::byte* address(Block, int32_t, int32_t) const { return nullptr; }
  // The block's bytes are no longer wanted.
  virtual void drop(Block block) = 0;
  // Frees the memory. Nothing is read or written afterwards.
  virtual void close() {}
};

}  // namespace mtserve
