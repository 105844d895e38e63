// Page kernels: append, gather, scatter. No torch and no CUDA headers here, so that g++ can compile and run them too.
//
// Bandwidth-bound by design: each byte is read once and written once, in units of up to 16 bytes, neighbouring threads
// on neighbouring units. All offsets are 64 bits wide. A page is its K block, then its V block (csrc/tiers/geometry.h);
// only token rows that are asked for are touched.
//
// Slots, page ids and row counts lie on the device, where the host does not look at them. An entry that points outside
// the table is skipped: what it was to move is lost, nothing else is overwritten. Where `bad` is given, it is told there.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace mtserve::cuda {

// In units of the copy type.
struct PageShape {
  int64_t page_size;  // tokens
  int64_t k_row, v_row;
  int64_t num_pages;  // of the table
};

// The widest unit that divides every address, stride and size, which `alignment` is the union of.
constexpr int unit_bytes(uint64_t alignment) {
  for (const int unit : {16, 8, 4, 2})
    if (alignment % unit == 0) return unit;
  return 1;
}

// Any one of the entries that are wrong, if there are several.
__device__ inline void tell(int64_t* bad, int64_t entry) {
  if (bad != nullptr && threadIdx.x == 0) *bad = entry;
}

// Dense rows of keys and values to their slots: page * page_size + row, -1 skips. Strides in units. Entries are rows.
template <class Unit>
__global__ void append_pages(Unit* table, const Unit* k, const Unit* v, const int64_t* slots, int64_t rows, int64_t k_stride, int64_t v_stride,
                             PageShape shape, int64_t* bad) {
  for (int64_t t = blockIdx.x; t < rows; t += gridDim.x) {
    const int64_t slot = slots[t];
    if (slot < -1 || slot >= shape.num_pages * shape.page_size) tell(bad, t);
    if (slot < 0 || slot >= shape.num_pages * shape.page_size) continue;
    Unit* page = table + slot / shape.page_size * (shape.page_size * (shape.k_row + shape.v_row));
    const int64_t row = slot % shape.page_size;
    Unit* k_to = page + row * shape.k_row;
    Unit* v_to = page + shape.page_size * shape.k_row + row * shape.v_row;
    for (int64_t i = threadIdx.x; i < shape.k_row + shape.v_row; i += blockDim.x) {
      if (i < shape.k_row)
        k_to[i] = k[t * k_stride + i];
      else
        v_to[i - shape.k_row] = v[t * v_stride + i - shape.k_row];
    }
  }
}

// Token rows below num_rows[i] of pages, between a table [layers, pages, page] and a dense buffer [layers, n, page].
// `to_table` chooses the direction: scatter or gather. Page id -1 skips. Entries are pages of the buffer.
template <class Unit, bool to_table>
__global__ void move_pages(Unit* table, Unit* buffer, const int32_t* page_ids, const int32_t* num_rows, int64_t n, int64_t layers,
                           int64_t table_layer_stride, int64_t buffer_layer_stride, PageShape shape, int64_t* bad) {
  const int64_t page_units = shape.page_size * (shape.k_row + shape.v_row);
  for (int64_t item = blockIdx.x; item < n * layers; item += gridDim.x) {
    const int64_t layer = item / n, i = item % n;
    const int64_t page = page_ids[i], rows = num_rows[i];
    const bool is_wrong = page < -1 || page >= shape.num_pages || rows < 0 || rows > shape.page_size;
    if (is_wrong) tell(bad, i);
    if (is_wrong || page < 0) continue;
    Unit* in_table = table + layer * table_layer_stride + page * page_units;
    Unit* in_buffer = buffer + layer * buffer_layer_stride + i * page_units;
    const int64_t k_units = rows * shape.k_row, v_units = rows * shape.v_row;
    for (int64_t u = threadIdx.x; u < k_units + v_units; u += blockDim.x) {
      const int64_t at = u < k_units ? u : shape.page_size * shape.k_row + u - k_units;
      if (to_table)
        in_table[at] = in_buffer[at];
      else
        in_buffer[at] = in_table[at];
    }
  }
}

}  // namespace mtserve::cuda
