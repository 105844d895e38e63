// Copies of token rows and pages between dense tensors and the device table.
//
// The table is [layers, pages, page_size * (k_row + v_row)]: a page of one layer is its K block [page_size,
// k_row] and behind it its V block [page_size, v_row]. All strides and sizes are bytes, so that one copy
// serves every dtype, and 64 bits wide: a page id is widened before it is multiplied.
#pragma once

#include <cstdint>

namespace mtserve::kernels {

struct AppendArgs {
  char* table;  // of one layer
  int64_t page_stride;
  int64_t page_size;
  const char* k;
  const char* v;
  int64_t k_stride;  // between token rows of k
  int64_t v_stride;
  int64_t k_bytes;  // of one token's K
  int64_t v_bytes;
  const int64_t* slots;  // page id * page_size + row; negative: skipped
  int64_t total_bytes;   // of the tokens that are not skipped
};

// Writes the token rows [begin, end).
void append_pages(const AppendArgs& args, int64_t begin, int64_t end);

struct TransferArgs {
  const char* from;
  char* to;
  int64_t from_layer_stride;
  int64_t to_layer_stride;
  int64_t from_page_stride;
  int64_t to_page_stride;
  const int32_t* page_ids;  // negative: skipped
  const int32_t* num_rows;  // token rows copied per page
  int64_t count;            // entries of page_ids
  int64_t page_size;
  int64_t k_bytes;
  int64_t v_bytes;
  int64_t total_bytes;  // of the whole transfer, all threads together
};

// Both run over the flat range of (layer, entry) pairs [begin, end), entry fastest.
// Table pages to consecutive pages.
void gather_pages(const TransferArgs& args, int64_t begin, int64_t end);
// Consecutive pages to table pages.
void scatter_pages(const TransferArgs& args, int64_t begin, int64_t end);

}  // namespace mtserve::kernels
