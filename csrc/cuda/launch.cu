#include "cuda/launch.h"

#include <algorithm>

#include "cuda/page_kernels.cuh"
#include "cuda/piece_copy.cuh"
#include "runtime/copy.h"

namespace mtserve::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int64_t kMaxBlocks = 1 << 16;  // kernels loop over what is left

int blocks(int64_t items) { return static_cast<int>(std::min(items, kMaxBlocks)); }

PageShape in_units(const PageBytes& b, int64_t unit) { return {b.page_size, b.k_row / unit, b.v_row / unit, b.num_pages}; }

template <class Launch>
int with_unit(uint64_t alignment, const Launch& launch) {
  cudaGetLastError();  // what others left is not this launch's
  switch (unit_bytes(alignment)) {
    case 16:
      launch(uint4{});
      break;
    case 8:
      launch(uint64_t{});
      break;
    case 4:
      launch(uint32_t{});
      break;
    case 2:
      launch(uint16_t{});
      break;
    default:
      launch(uint8_t{});
  }
  return cudaGetLastError();
}

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

template <bool to_table>
int move(void* table, void* buffer, const int32_t* page_ids, const int32_t* num_rows, int64_t n, int64_t layers, int64_t table_layer_stride,
         int64_t buffer_layer_stride, const PageBytes& bytes, int64_t* bad, void* stream) {
  if (n * layers == 0) return 0;
  const uint64_t alignment = address(table) | address(buffer) | bytes.k_row | bytes.v_row | table_layer_stride | buffer_layer_stride;
  return with_unit(alignment, [&](auto unit) {
    using Unit = decltype(unit);
    constexpr int64_t size = sizeof(Unit);
    move_pages<Unit, to_table><<<blocks(n * layers), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<Unit*>(table), static_cast<Unit*>(buffer), page_ids, num_rows, n, layers, table_layer_stride / size, buffer_layer_stride / size,
        in_units(bytes, size), bad);
  });
}

}  // namespace

int append_pages(void* table, const void* k, const void* v, const int64_t* slots, int64_t rows, int64_t k_stride, int64_t v_stride,
                 const PageBytes& bytes, int64_t* bad, void* stream) {
  if (rows == 0) return 0;
  const uint64_t alignment = address(table) | address(k) | address(v) | bytes.k_row | bytes.v_row | k_stride | v_stride;
  return with_unit(alignment, [&](auto unit) {
    using Unit = decltype(unit);
    constexpr int64_t size = sizeof(Unit);
    append_pages<Unit><<<blocks(rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<Unit*>(table), static_cast<const Unit*>(k), static_cast<const Unit*>(v), slots, rows, k_stride / size, v_stride / size,
        in_units(bytes, size), bad);
  });
}

int gather_pages(const void* table, void* buffer, const int32_t* page_ids, const int32_t* num_rows, int64_t n, int64_t layers,
                 int64_t table_layer_stride, int64_t buffer_layer_stride, const PageBytes& bytes, int64_t* bad, void* stream) {
  return move<false>(const_cast<void*>(table), buffer, page_ids, num_rows, n, layers, table_layer_stride, buffer_layer_stride, bytes, bad, stream);
}

int scatter_pages(void* table, const void* buffer, const int32_t* page_ids, const int32_t* num_rows, int64_t n, int64_t layers,
                  int64_t table_layer_stride, int64_t buffer_layer_stride, const PageBytes& bytes, int64_t* bad, void* stream) {
  return move<true>(table, const_cast<void*>(buffer), page_ids, num_rows, n, layers, table_layer_stride, buffer_layer_stride, bytes, bad, stream);
}

int copy_pieces(const Piece* pieces, size_t count, void* stream) {
  cudaGetLastError();  // what others left is not this launch's
  for (size_t done = 0; done < count; done += kRuns) {
    const size_t n = std::min(count - done, static_cast<size_t>(kRuns));
    Runs runs;
    int64_t longest = 0;
    for (size_t i = 0; i < n; ++i) {
      const Piece& piece = pieces[done + i];
      runs.run[i] = {reinterpret_cast<unsigned char*>(piece.to), reinterpret_cast<const unsigned char*>(piece.from), piece.bytes};
      longest = std::max(longest, piece.bytes);
    }
    // 16 units of 16 bytes per thread.
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>(longest / (kThreads * 256) + 1, 1024)), static_cast<unsigned>(n));
    copy_runs<uint4><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(runs);
    if (const int code = cudaGetLastError()) return code;
  }
  return 0;
}

int make_report(int64_t** bad) {
  const int code = cudaHostAlloc(reinterpret_cast<void**>(bad), sizeof(int64_t), cudaHostAllocPortable | cudaHostAllocMapped);
  if (code == 0)
    **bad = -1;
  else
    cudaGetLastError();
  return code;
}

int read_report(int64_t* bad, void* stream, int64_t* entry) {
  const int code = cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
  if (code != 0) cudaGetLastError();
  *entry = *bad;
  cudaFreeHost(bad);
  return code;
}

bool is_recorded(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t code = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  if (code != cudaSuccess) cudaGetLastError();
  return code == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

const char* error_name(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace mtserve::cuda
