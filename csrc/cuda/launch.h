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
  int64_t num_pages;  // of the table
};

// Each returns a CUDA error code, 0 for success; `error_name` puts it in words. Entries that point outside the table are
// skipped; `bad`, if not null, is memory of `make_report`, where one of them is told.
int append_pages(void* table, const void* k, const void* v, const int64_t* slots, int64_t rows, int64_t k_stride, int64_t v_stride,
                 const PageBytes& bytes, int64_t* bad, void* stream);
int gather_pages(const void* table, void* buffer, const int32_t* page_ids, const int32_t* num_rows, int64_t n, int64_t layers,
                 int64_t table_layer_stride, int64_t buffer_layer_stride, const PageBytes& bytes, int64_t* bad, void* stream);
int scatter_pages(void* table, const void* buffer, const int32_t* page_ids, const int32_t* num_rows, int64_t n, int64_t layers,
                  int64_t table_layer_stride, int64_t buffer_layer_stride, const PageBytes& bytes, int64_t* bad, void* stream);
int copy_pieces(const Piece* pieces, size_t count, void* stream);
// Host memory that kernels write; -1 at first. `read_report` waits for the stream and frees it.
int make_report(int64_t** bad);
int read_report(int64_t* bad, void* stream, int64_t* entry);
bool is_recorded(void* stream);
const char* error_name(int error);

}  // namespace mtserve::cuda
