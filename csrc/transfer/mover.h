// Carries out transfer tasks: one layer's slice of a block at a time, between device pages and the host tier.
#pragma once

#include "index/types.h"
#include "tiers/device_table.h"
#include "tiers/tier.h"

namespace mtserve {

class Mover {
 public:
  Mover(const Geometry& geometry, const DeviceTable& table, Tier& tier, int32_t chunk_tokens)
      : geometry_(geometry), table_(table), tier_(tier), chunk_tokens_(chunk_tokens) {}

  void onload_layer(const TransferTask& task, int32_t layer);
  void offload_layer(const TransferTask& task, int32_t layer);

 private:
  template <class Move>
  void for_each_block(const TransferTask& task, int32_t layer, Move move);

  const Geometry geometry_;
  const DeviceTable table_;
  Tier& tier_;
  const int32_t chunk_tokens_;
};

}  // namespace mtserve
