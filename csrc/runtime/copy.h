// A copy as data, so that every runtime carries it out in its own way: memcpy on a thread, a copy engine, a kernel.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace mtserve {

// A run of bytes.
struct Piece {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  int64_t bytes = 0;
};

// Between which memories all pieces of a copy lie.
enum class Route { to_device, to_host, on_device };

struct Faults;
using FaultCounter = std::atomic<int64_t> Faults::*;

struct CopyOrder {
  const char* name = "";  // a literal
  Route route = Route::on_device;
  std::vector<Piece> pieces;
  std::atomic<bool>* failed = nullptr;  // set when the copy fails; when it is set already, nothing is copied
  std::shared_ptr<void> owner;          // keeps what `failed` and the pieces belong to
  Faults* faults = nullptr;             // where injected faults are counted ...
  FaultCounter fault = nullptr;         // ... and under which name; null: this copy is never chosen
  int32_t layer = 0;                    // whose keys and values; for messages
};

// Does it now, on this thread.
void carry_out(const CopyOrder& order);

}  // namespace mtserve
