#include "transfer/mover.h"

#include <algorithm>
#include <vector>

namespace mtserve {

template <class Move>
void Mover::for_each_block(const TransferTask& task, int32_t layer, Move move) {
  const int32_t size = geometry_.page_size;
  const int32_t first_page = task.first / size;
  std::vector<PageRows> rows;
  int32_t at = task.first;
  for (const Block& block : task.blocks) {
    const int32_t chunk = at / chunk_tokens_;
    const int32_t end = std::min(task.end, (chunk + 1) * chunk_tokens_);
    rows.clear();
    while (at < end) {
      const int32_t page = at / size;
      const int32_t stop = std::min(end, (page + 1) * size);
      rows.push_back({table_.page(layer, task.pages[page - first_page]), page - chunk * (chunk_tokens_ / size),
                      at - page * size, stop - page * size});
      at = stop;
    }
    move(block, rows);
  }
}

void Mover::onload_layer(const TransferTask& task, int32_t layer) {
  for_each_block(task, layer, [&](Block block, const auto& rows) { tier_.read(block, layer, rows); });
}

void Mover::offload_layer(const TransferTask& task, int32_t layer) {
  for_each_block(task, layer, [&](Block block, const auto& rows) { tier_.write(block, layer, rows); });
}

}  // namespace mtserve
