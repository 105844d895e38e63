// torch.ops.mtserve.{append,gather,scatter}_pages for CUDA tensors. Shapes and dtypes are checked as on the CPU; values
// of index tensors are not, since looking at them would wait for the device.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "cuda/launch.h"

namespace mtserve::cuda {
namespace {

using torch::stable::Tensor;

void require(bool condition, const char* op, const std::string& what) {
  if (!condition) throw std::runtime_error(std::string(op) + ": " + what);
}

// Found when it is first needed: a torch without CUDA, which is enough to build this, has no library to link to.
using CurrentStream = AOTITorchError (*)(int32_t device_index, void** stream);

CurrentStream find_current_stream() {
  void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  return torch_cuda == nullptr ? nullptr : reinterpret_cast<CurrentStream>(dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream"));
}

void* current_stream(const Tensor& on) {
  static const CurrentStream current = find_current_stream();
  void* stream = nullptr;
  if (current == nullptr || current(on.get_device(), &stream) != 0) throw std::runtime_error("torch tells no current CUDA stream");
  return stream;
}

void check(const char* op, int error) {
  require(error == 0, op, std::string("CUDA reports: ") + error_name(error));
}

int64_t bytes_of(const Tensor& x) { return static_cast<int64_t>(x.element_size()); }

void append(Tensor table, int64_t layer, Tensor k, Tensor v, Tensor slots, int64_t page_size) {
  const char* op = "append_pages";
  require(table.dim() == 3 && k.dim() == 3 && v.dim() == 3 && slots.dim() == 1, op, "expected table [L, P, E], k and v [T, H, D], slots [T]");
  require(layer >= 0 && layer < table.size(0), op, "layer is out of range");
  require(k.size(0) == slots.size(0) && v.size(0) == slots.size(0), op, "k, v and slots must have the same number of rows");
  require(table.stride(2) == 1 && table.stride(1) == table.size(2), op, "the pages of the table must be contiguous");
  const auto dense = [](const Tensor& x) { return x.stride(2) == 1 && x.stride(1) == x.size(2); };
  require(dense(k) && dense(v), op, "rows of k and v must be contiguous; their first stride is free");
  const int64_t size = bytes_of(table);
  const PageBytes bytes{page_size, k.size(1) * k.size(2) * size, v.size(1) * v.size(2) * size};
  require(page_size * (bytes.k_row + bytes.v_row) == table.size(2) * size, op, "a page of the table does not hold page_size rows of k and v");
  char* base = static_cast<char*>(table.mutable_data_ptr()) + layer * table.stride(0) * size;
  check(op, append_pages(base, k.const_data_ptr(), v.const_data_ptr(), static_cast<const int64_t*>(slots.const_data_ptr()), slots.size(0),
                         k.stride(0) * size, v.stride(0) * size, bytes, current_stream(table)));
}

struct Move {
  PageBytes bytes;
  int64_t table_stride, buffer_stride;
};

Move check_move(const char* op, const Tensor& table, const Tensor& buffer, const Tensor& page_ids, const Tensor& num_rows, int64_t k_row,
                int64_t page_size) {
  require(table.dim() == 3 && buffer.dim() == 3, op, "expected table [L, P, E] and a buffer [L, n, E]");
  require(table.size(0) == buffer.size(0) && table.size(2) == buffer.size(2), op, "table and buffer differ in layers or page elements");
  require(page_ids.dim() == 1 && num_rows.dim() == 1 && page_ids.size(0) == buffer.size(1) && num_rows.size(0) == buffer.size(1), op,
          "page_ids and num_rows must have one entry per page of the buffer");
  for (const Tensor* x : {&table, &buffer})
    require(x->stride(2) == 1 && (x->stride(1) == x->size(2) || x->size(1) <= 1), op, "pages must be contiguous");
  const int64_t size = bytes_of(table);
  const int64_t v_row = table.size(2) / page_size - k_row;
  require(page_size > 0 && v_row > 0 && (k_row + v_row) * page_size == table.size(2), op, "k_row and page_size do not fit the page");
  return {{page_size, k_row * size, v_row * size}, table.stride(0) * size, buffer.stride(0) * size};
}

void gather(Tensor table, Tensor out, Tensor page_ids, Tensor num_rows, int64_t k_row, int64_t page_size) {
  const Move m = check_move("gather_pages", table, out, page_ids, num_rows, k_row, page_size);
  check("gather_pages", gather_pages(table.const_data_ptr(), out.mutable_data_ptr(), static_cast<const int32_t*>(page_ids.const_data_ptr()),
                                     static_cast<const int32_t*>(num_rows.const_data_ptr()), page_ids.size(0), table.size(0), m.table_stride,
                                     m.buffer_stride, m.bytes, current_stream(table)));
}

void scatter(Tensor table, Tensor source, Tensor page_ids, Tensor num_rows, int64_t k_row, int64_t page_size) {
  const Move m = check_move("scatter_pages", table, source, page_ids, num_rows, k_row, page_size);
  check("scatter_pages", scatter_pages(table.mutable_data_ptr(), source.const_data_ptr(), static_cast<const int32_t*>(page_ids.const_data_ptr()),
                                       static_cast<const int32_t*>(num_rows.const_data_ptr()), page_ids.size(0), table.size(0), m.table_stride,
                                       m.buffer_stride, m.bytes, current_stream(table)));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mtserve, CUDA, m) {
  m.impl("append_pages", TORCH_BOX(&append));
  m.impl("gather_pages", TORCH_BOX(&gather));
  m.impl("scatter_pages", TORCH_BOX(&scatter));
}

}  // namespace mtserve::cuda
