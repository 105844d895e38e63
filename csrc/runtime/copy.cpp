#include "runtime/copy.h"

#include "runtime/faults.h"
#include "runtime/stream_copy.h"

namespace mtserve {

void carry_out(const CopyOrder& order) {
  if (*order.failed) return;
  try {
    if (order.fault != nullptr) strike(*order.faults, order.faults->*order.fault);
    for (const Piece& piece : order.pieces) copy_past_caches(piece.to, piece.from, static_cast<size_t>(piece.bytes));
  } catch (...) {
    *order.failed = true;
  }
}

void Stream::copy(CopyOrder order) {
  const auto shared = std::make_shared<const CopyOrder>(std::move(order));
  launch(
      shared->name, [shared] { carry_out(*shared); },
      [&] {
        Accesses out;
        for (const Piece& piece : shared->pieces) {
          out.push_back({piece.from, piece.bytes, false});
          out.push_back({piece.to, piece.bytes, true});
        }
        return out;
      });
}

}  // namespace mtserve
