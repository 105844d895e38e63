// Launches of the page kernels on a stream; sizes in bytes. Plain C++ for callers without nvcc.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mtserve {
struct Piece;
}

namespace mtserve::cuda {

struct PageBytes {
  int64_t page_size;  // tokens
  int64_t k_row, v_row;
};

// Each returns a CUDA error code, 0 for success; `error_name` puts it in words.
int append_pages(void* table, const void* k, const void* v, const int64_t* slots, int64_t rows, int64_t k_stride, int64_t v_stride,
                 const PageBytes& bytes, void* stream);
int gather_pages(const void* table, void* buffer, const int32_t* page_ids, const int32_t* num_rows, int64_t n, int64_t layers,
                 int64_t table_layer_stride, int64_t buffer_layer_stride, const PageBytes& bytes, void* stream);
int scatter_pages(void* table, const void* buffer, const int32_t* page_ids, const int32_t* num_rows, int64_t n, int64_t layers,
                  int64_t table_layer_stride, int64_t buffer_layer_stride, const PageBytes& bytes, void* stream);
int copy_pieces(const Piece* pieces, size_t count, void* stream);
const char* error_name(int error);

}  // namespace mtserve::cuda
