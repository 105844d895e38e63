// torch.ops.mtserve.{append,gather,scatter}_pages for CUDA tensors. Shapes, dtypes and devices are checked; values of
// index tensors are not, since looking at them would wait for the device: kernels skip entries that point outside the
// table. MTSERVE_CHECK_CUDA=1 in the environment makes every call wait and raise for them, in order to find a mistake.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "cuda/launch.h"

namespace mtserve::cuda {
namespace {

using torch::headeronly::ScalarType;
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
  if (current == nullptr || current(on.get_device_index(), &stream) != 0) throw std::runtime_error("torch tells no current CUDA stream");
  return stream;
}

void check(const char* op, int error) {
  require(error == 0, op, std::string("CUDA reports: ") + error_name(error));
}

bool values_are_checked() {
  static const bool checked = [] {
    const char* wish = std::getenv("MTSERVE_CHECK_CUDA");
    return wish != nullptr && std::strcmp(wish, "") != 0 && std::strcmp(wish, "0") != 0;
  }();
  return checked;
}

// Launches on the table's device, whichever is current, and on the caller's stream there.
template <class Launch>
void run(const char* op, const Tensor& table, const char* entries, const Launch& launch) {
  const torch::stable::accelerator::DeviceGuard here(table.get_device_index());
  void* const stream = current_stream(table);
  // A check waits for the stream, which must not be while it is recorded.
  if (!values_are_checked() || is_recorded(stream)) return check(op, launch(nullptr, stream));
  int64_t* bad = nullptr;
  check(op, make_report(&bad));
  const int launched = launch(bad, stream);
  int64_t entry = -1;
  const int ran = read_report(bad, stream, &entry);
  check(op, launched);
  check(op, ran);
  require(entry < 0, op, std::string(entries) + "[" + std::to_string(entry) + "] points outside the table");
}

struct Named {
  const char* name;
  const Tensor& tensor;
};

void require_beside(const char* op, const Tensor& table, std::initializer_list<Named> others) {
  for (const auto& [name, x] : others) {
    require(x.is_cuda(), op, std::string(name) + " must be on the table's device, cuda:" + std::to_string(table.get_device_index()));
    require(x.get_device_index() == table.get_device_index(), op,
            std::string(name) + " is on cuda:" + std::to_string(x.get_device_index()) + ", the table on cuda:" +
                std::to_string(table.get_device_index()));
  }
}

void require_dtype(const char* op, const Named& x, ScalarType dtype) {
  require(x.tensor.scalar_type() == dtype, op,
          std::string(x.name) + " is " + torch::headeronly::toString(x.tensor.scalar_type()) + "; expected " + torch::headeronly::toString(dtype));
}

int64_t bytes_of(const Tensor& x) { return static_cast<int64_t>(x.element_size()); }

// The memory of what is returned stays until work that is queued on the caller's stream is done.
Tensor packed(const Tensor& x) { return x.size(0) <= 1 || x.stride(0) == 1 ? x : torch::stable::contiguous(x); }

// But for the first dimension, whose stride is free.
bool is_dense(const Tensor& x) { return (x.size(2) <= 1 || x.stride(2) == 1) && (x.size(1) <= 1 || x.stride(1) == x.size(2)); }

Tensor dense_rows(const Tensor& x) { return is_dense(x) ? x : torch::stable::contiguous(x); }

void append(Tensor table, int64_t layer, Tensor k, Tensor v, Tensor slots, int64_t page_size) {
  const char* op = "append_pages";
  require(table.dim() == 3 && k.dim() == 3 && v.dim() == 3 && slots.dim() == 1, op, "expected table [L, P, E], k and v [T, H, D], slots [T]");
  require_beside(op, table, {{"k", k}, {"v", v}, {"slots", slots}});
  require_dtype(op, {"k", k}, table.scalar_type());
  require_dtype(op, {"v", v}, table.scalar_type());
  require_dtype(op, {"slots", slots}, ScalarType::Long);
  require(layer >= 0 && layer < table.size(0), op, "layer is out of range");
  require(k.size(0) == slots.size(0) && v.size(0) == slots.size(0), op, "k, v and slots must have the same number of rows");
  require(is_dense(table), op, "the pages of the table must be contiguous");
  require(page_size > 0, op, "page_size must be positive");
  const Tensor k_rows = dense_rows(k), v_rows = dense_rows(v), at = packed(slots);
  const int64_t size = bytes_of(table);
  const PageBytes bytes{page_size, k.size(1) * k.size(2) * size, v.size(1) * v.size(2) * size, table.size(1)};
  require(page_size * (bytes.k_row + bytes.v_row) == table.size(2) * size, op, "a page of the table does not hold page_size rows of k and v");
  char* base = static_cast<char*>(table.mutable_data_ptr()) + layer * table.stride(0) * size;
  run(op, table, "slots", [&](int64_t* bad, void* stream) {
    return append_pages(base, k_rows.const_data_ptr(), v_rows.const_data_ptr(), static_cast<const int64_t*>(at.const_data_ptr()), at.size(0),
                        k_rows.stride(0) * size, v_rows.stride(0) * size, bytes, bad, stream);
  });
}

struct Move {
  PageBytes bytes;
  int64_t table_stride, buffer_stride;
  Tensor page_ids, num_rows;

  const int32_t* ids() const { return static_cast<const int32_t*>(page_ids.const_data_ptr()); }
  const int32_t* rows() const { return static_cast<const int32_t*>(num_rows.const_data_ptr()); }
};

Move check_move(const char* op, const Tensor& table, const Named& buffer, const Tensor& page_ids, const Tensor& num_rows, int64_t k_row,
                int64_t page_size) {
  const Tensor& pages = buffer.tensor;
  require(table.dim() == 3 && pages.dim() == 3, op, std::string("expected table [L, P, E] and ") + buffer.name + " [L, n, E]");
  require_beside(op, table, {buffer, {"page_ids", page_ids}, {"num_rows", num_rows}});
  require_dtype(op, buffer, table.scalar_type());
  require_dtype(op, {"page_ids", page_ids}, ScalarType::Int);
  require_dtype(op, {"num_rows", num_rows}, ScalarType::Int);
  require(table.size(0) == pages.size(0) && table.size(2) == pages.size(2), op,
          std::string("table and ") + buffer.name + " differ in layers or page elements");
  require(page_ids.dim() == 1 && num_rows.dim() == 1 && page_ids.size(0) == pages.size(1) && num_rows.size(0) == pages.size(1), op,
          std::string("page_ids and num_rows must have one entry per page of ") + buffer.name);
  require(is_dense(table) && is_dense(pages), op, "pages must be contiguous");
  require(page_size > 0 && table.size(2) % page_size == 0 && k_row >= 0 && k_row <= table.size(2) / page_size, op,
          "k_row and page_size do not fit the page");
  const int64_t size = bytes_of(table);
  const int64_t v_row = table.size(2) / page_size - k_row;
  return {{page_size, k_row * size, v_row * size, table.size(1)},
          table.stride(0) * size,
          pages.stride(0) * size,
          packed(page_ids),
          packed(num_rows)};
}

constexpr const char* kEntries = "page_ids or num_rows";

void gather(Tensor table, Tensor out, Tensor page_ids, Tensor num_rows, int64_t k_row, int64_t page_size) {
  const Move m = check_move("gather_pages", table, {"out", out}, page_ids, num_rows, k_row, page_size);
  run("gather_pages", table, kEntries, [&](int64_t* bad, void* stream) {
    return gather_pages(table.const_data_ptr(), out.mutable_data_ptr(), m.ids(), m.rows(), out.size(1), table.size(0), m.table_stride,
                        m.buffer_stride, m.bytes, bad, stream);
  });
}

void scatter(Tensor table, Tensor source, Tensor page_ids, Tensor num_rows, int64_t k_row, int64_t page_size) {
  const Move m = check_move("scatter_pages", table, {"source", source}, page_ids, num_rows, k_row, page_size);
  run("scatter_pages", table, kEntries, [&](int64_t* bad, void* stream) {
    return scatter_pages(table.mutable_data_ptr(), source.const_data_ptr(), m.ids(), m.rows(), source.size(1), table.size(0), m.table_stride,
                         m.buffer_stride, m.bytes, bad, stream);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mtserve, CUDA, m) {
  m.impl("append_pages", TORCH_BOX(&append));
  m.impl("gather_pages", TORCH_BOX(&gather));
  m.impl("scatter_pages", TORCH_BOX(&scatter));
}

}  // namespace mtserve::cuda
