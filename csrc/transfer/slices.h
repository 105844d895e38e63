// Cuts a transfer task into the unit of movement: one layer's slice of one block.
#pragma once

#include <algorithm>
#include <vector>

#include "index/types.h"
#include "runtime/copy.h"
#include "runtime/runtime.h"
#include "tiers/device_table.h"
#include "tiers/tier.h"

namespace mtserve {

struct Slice {
  Block block;
  int32_t first_page = 0;      // index of the slice's first page among the task's pages
  std::vector<PageRows> rows;  // one per page, in order
};

// Where the parts of a transfer lie; shared by both pipelines.
struct Places {
  Geometry geometry;
  DeviceTable table;
  int32_t chunk_tokens = 0;
  Tier* tier = nullptr;

  // Whether blocks lie in memory that streams can copy from and to.
  bool tier_is_memory() const { return tier->address({0, 0}, 0, 0) != nullptr; }
  int32_t chunk_pages() const { return chunk_tokens / geometry.page_size; }
  int64_t slice_bytes() const { return chunk_pages() * geometry.page_bytes(); }
};

// Calls visit(index of the block, index of the page among the task's, rows; their page null where there is none) in order.
template <class Visit>
void for_each_page(const Places& places, const TransferTask& task, int32_t layer, Visit visit) {
  const int32_t size = places.geometry.page_size;
  const int32_t first_page = task.first / size;
  int32_t at = task.first;
  for (size_t block = 0; block < task.blocks.size(); ++block) {
    const int32_t chunk = at / places.chunk_tokens;
    const int32_t end = std::min(task.end, (chunk + 1) * places.chunk_tokens);
    while (at < end) {
      const int32_t page = at / size;
      const int32_t stop = std::min(end, (page + 1) * size);
      std::byte* const rows = task.pages.empty() ? nullptr : places.table.page(layer, task.pages[page - first_page]);
      visit(block, page - first_page, PageRows{rows, page - chunk * places.chunk_pages(), at - page * size, stop - page * size});
      at = stop;
    }
  }
}

inline std::vector<Slice> slices(const Places& places, const TransferTask& task, int32_t layer) {
  std::vector<Slice> out;
  for_each_page(places, task, layer, [&](size_t block, int32_t page, const PageRows& rows) {
    if (out.size() == block) out.push_back({task.blocks[block], page, {}});
    out[block].rows.push_back(rows);
  });
  return out;
}

// The bytes of token rows [first, end) of a page: a piece of its K block and one of its V block.
inline void add_rows(Accesses& out, const Geometry& g, const std::byte* page, int32_t first, int32_t end, bool write) {
  if (page == nullptr || end <= first) return;
  out.push_back({page + first * g.k_row_bytes, (end - first) * g.k_row_bytes, write});
  out.push_back({page + g.page_size * g.k_row_bytes + first * g.v_row_bytes, (end - first) * g.v_row_bytes, write});
}

// What moving slices between pages and host blocks touches.
inline Accesses slice_accesses(const Places& places, const std::vector<Slice>& parts, int32_t layer, bool to_pages) {
  Accesses out;
  for (const Slice& slice : parts)
    for (const PageRows& r : slice.rows) {
      add_rows(out, places.geometry, r.page, r.first, r.end, to_pages);
      add_rows(out, places.geometry, places.tier->address(slice.block, layer, r.page_in_block), r.first, r.end, !to_pages);
    }
  return out;
}

// Bytes that follow the piece before on both sides make it longer.
inline void add_piece(std::vector<Piece>& out, const Piece& piece) {
  if (!out.empty() && out.back().to + out.back().bytes == piece.to && out.back().from + out.back().bytes == piece.from)
    out.back().bytes += piece.bytes;
  else
    out.push_back(piece);
}

// Token rows [first, end) of a page: one run of bytes for a whole page, else one of its K block and one of its V block.
inline void add_pieces(std::vector<Piece>& out, const Geometry& g, std::byte* to, const std::byte* from, int32_t first, int32_t end) {
  if (first == 0 && end == g.page_size) {
    add_piece(out, {to, from, g.page_bytes()});
    return;
  }
  const int64_t k = first * g.k_row_bytes, v = g.page_size * g.k_row_bytes + first * g.v_row_bytes;
  add_piece(out, {to + k, from + k, (end - first) * g.k_row_bytes});
  add_piece(out, {to + v, from + v, (end - first) * g.v_row_bytes});
}

// Moves one layer of a task between pages and the blocks of a tier that is memory.
inline std::vector<Piece> tier_pieces(const Places& places, const TransferTask& task, int32_t layer, bool to_pages) {
  std::vector<Piece> out;
  out.reserve(task.pages.size() + 2);  // the first and the last page may be two pieces
  for_each_page(places, task, layer, [&](size_t i, int32_t, const PageRows& r) {
    std::byte* block = places.tier->address(task.blocks[i], layer, r.page_in_block);
    add_pieces(out, places.geometry, to_pages ? r.page : block, to_pages ? block : r.page, r.first, r.end);
  });
  return out;
}

inline int64_t task_bytes(const Places& places, const TransferTask& task) {
  const Geometry& g = places.geometry;
  return int64_t{task.end - task.first} * g.num_layers * (g.k_row_bytes + g.v_row_bytes);
}

}  // namespace mtserve
