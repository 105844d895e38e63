// torch.ops.mtserve.*: argument checks and calls of the kernels. The schemas are documented in
// `mtserve_plugin/ops.py`.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>

#include "kernels/attention.h"
#include "kernels/copy_pages.h"

namespace mtserve::kernels {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A thread that copies less than this is not worth waking up.
constexpr int64_t kCopyGrainBytes = 256 << 10;

template <class... Parts>
[[noreturn, gnu::noinline]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// The parts are only evaluated when the condition fails.
#define CHECK_ARG(condition, ...)  \
  do {                             \
    if (!(condition)) [[unlikely]] \
      fail(op, __VA_ARGS__);       \
  } while (false)

struct Shape {
  const Tensor& tensor;
  friend std::ostream& operator<<(std::ostream& out, const Shape& shape) {
    out << '[';
    for (int64_t i = 0; i < shape.tensor.dim(); ++i) out << (i ? ", " : "") << shape.tensor.size(i);
    return out << ']';
  }
};

const char* name_of(ScalarType dtype) { return torch::headeronly::toString(dtype); }

void check_dim(const char* op, const char* name, const Tensor& x, int64_t dim, const char* expected) {
  CHECK_ARG(x.dim() == dim, name, " has shape ", Shape{x}, "; expected ", expected);
}

void check_dtype(const char* op, const char* name, const Tensor& x, ScalarType dtype) {
  CHECK_ARG(x.scalar_type() == dtype, name, " is ", name_of(x.scalar_type()), "; expected ", name_of(dtype));
}

DType floating_dtype(const char* op, const char* name, const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      fail(op, name, " is ", name_of(x.scalar_type()), "; expected Float, Half or BFloat16");
  }
}

// A dense one-dimensional index tensor; the tensor keeps the memory of `data` alive.
template <class T>
struct Indices {
  Tensor tensor;
  const T* data;
  int64_t size;
};

template <class T>
Indices<T> indices(const char* op, const char* name, const Tensor& x) {
  check_dim(op, name, x, 1, "one dimension");
  check_dtype(op, name, x, sizeof(T) == 8 ? ScalarType::Long : ScalarType::Int);
  Tensor dense = x.size(0) > 1 && x.stride(0) != 1 ? torch::stable::contiguous(x) : x;
  const T* data = static_cast<const T*>(dense.const_data_ptr());
  const int64_t size = dense.size(0);
  return {std::move(dense), data, size};
}

void check_page_size(const char* op, int64_t page_size, const Tensor& table) {
  const int64_t most = std::max<int64_t>(1, table.size(2));
  CHECK_ARG(page_size > 0 && page_size <= most, "page_size is ", page_size, "; expected 1 to ", most,
            ", the elements of a page of the table");
}

// Page ids and row counts of a transfer.
void check_pages(const char* op, const Indices<int32_t>& ids, const Indices<int32_t>& rows, int64_t pages,
                 int64_t page_size) {
  CHECK_ARG(rows.size == ids.size, "num_rows has ", rows.size, " entries; expected ", ids.size,
            ", one per page id");
  for (int64_t i = 0; i < ids.size; ++i) {
    CHECK_ARG(ids.data[i] >= -1 && ids.data[i] < pages, "page_ids[", i, "] is ", ids.data[i],
              "; the table has ", pages, " pages (-1 skips)");
    CHECK_ARG(rows.data[i] >= 0 && rows.data[i] <= page_size, "num_rows[", i, "] is ", rows.data[i],
              "; expected 0 to page_size=", page_size);
  }
}

// A table, or the dense pages of a transfer: [layers, pages, page_elements], the last dimension contiguous.
void check_table(const char* op, const char* name, const Tensor& x) {
  check_dim(op, name, x, 3, "[layers, pages, page_elements]");
  CHECK_ARG(x.size(2) <= 1 || x.stride(2) == 1, name,
            " must be contiguous in its last dimension; its stride is ", x.stride(2));
}

void append_pages_op(Tensor table, int64_t layer, const Tensor& k, const Tensor& v, const Tensor& slots,
                     int64_t page_size) {
  constexpr const char* op = "append_pages";
  check_table(op, "table", table);
  CHECK_ARG(layer >= 0 && layer < table.size(0), "layer is ", layer, "; the table has ", table.size(0),
            " layers");
  check_dim(op, "k", k, 3, "[tokens, heads, qk_dim]");
  check_dim(op, "v", v, 3, "[tokens, heads, v_dim]");
  check_dtype(op, "k", k, table.scalar_type());
  check_dtype(op, "v", v, table.scalar_type());
  check_page_size(op, page_size, table);
  const auto at = indices<int64_t>(op, "slots", slots);
  const int64_t tokens = k.size(0), k_row = k.size(1) * k.size(2), v_row = v.size(1) * v.size(2);
  CHECK_ARG(v.size(0) == tokens, "v has ", v.size(0), " token rows; k has ", tokens);
  CHECK_ARG(at.size == tokens, "slots has ", at.size, " entries; expected ", tokens,
            ", one per token row of k");
  CHECK_ARG(table.size(2) == page_size * (k_row + v_row), "table has pages of ", table.size(2),
            " elements; page_size=", page_size, " token rows of k and v are ", page_size * (k_row + v_row));
  const int64_t limit = table.size(1) * page_size;
  int64_t stored = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    CHECK_ARG(at.data[t] >= -1 && at.data[t] < limit, "slots[", t, "] is ", at.data[t], "; the table has ",
              limit, " slots (-1 skips)");
    stored += at.data[t] >= 0;
  }
  if (stored == 0) return;

  const auto dense_rows = [](const Tensor& x) {
    const bool dense = (x.size(2) == 1 || x.stride(2) == 1) && (x.size(1) == 1 || x.stride(1) == x.size(2));
    return dense ? x : torch::stable::contiguous(x);
  };
  const Tensor k_rows = dense_rows(k), v_rows = dense_rows(v);
  const auto bytes = static_cast<int64_t>(table.element_size());
  AppendArgs args{};
  args.table = static_cast<char*>(table.mutable_data_ptr()) + layer * table.stride(0) * bytes;
  args.page_stride = table.stride(1) * bytes;
  args.page_size = page_size;
  args.k = static_cast<const char*>(k_rows.const_data_ptr());
  args.v = static_cast<const char*>(v_rows.const_data_ptr());
  args.k_stride = k_rows.stride(0) * bytes;
  args.v_stride = v_rows.stride(0) * bytes;
  args.k_bytes = k_row * bytes;
  args.v_bytes = v_row * bytes;
  args.slots = at.data;
  // Most rows of a batch are candidates, which are skipped: what is stored decides whether threads are worth waking.
  args.total_bytes = (args.k_bytes + args.v_bytes) * stored;
  const int64_t share = args.total_bytes / tokens;
  const int64_t grain = std::max<int64_t>(1, kCopyGrainBytes / std::max<int64_t>(1, share));
  torch::stable::parallel_for(0, tokens, grain,
                              [&](int64_t begin, int64_t end) { append_pages(args, begin, end); });
}

// `gather`: from the table into `dense`; otherwise the other way round.
void transfer(const char* op, const Tensor& table, const char* dense_name, const Tensor& dense,
              const Tensor& page_ids, const Tensor& num_rows, int64_t k_row, int64_t page_size, bool gather) {
  check_table(op, "table", table);
  check_table(op, dense_name, dense);
  check_dtype(op, dense_name, dense, table.scalar_type());
  check_page_size(op, page_size, table);
  const auto ids = indices<int32_t>(op, "page_ids", page_ids);
  const auto rows = indices<int32_t>(op, "num_rows", num_rows);
  CHECK_ARG(dense.size(0) == table.size(0) && dense.size(1) == ids.size && dense.size(2) == table.size(2),
            dense_name, " has shape ", Shape{dense}, "; expected [", table.size(0), ", ", ids.size, ", ",
            table.size(2), "]");
  CHECK_ARG(table.size(2) % page_size == 0, "page_size=", page_size, " does not divide the table's ",
            table.size(2), " elements per page");
  const int64_t row = table.size(2) / page_size;
  CHECK_ARG(k_row >= 0 && k_row <= row, "k_row is ", k_row, "; a token's K and V together have ", row,
            " elements");
  check_pages(op, ids, rows, table.size(1), page_size);

  const auto bytes = static_cast<int64_t>(table.element_size());
  const Tensor& from = gather ? table : dense;
  const Tensor& to = gather ? dense : table;
  TransferArgs args{};
  args.from = static_cast<const char*>(from.const_data_ptr());
  args.to = static_cast<char*>(to.mutable_data_ptr());
  args.from_layer_stride = from.stride(0) * bytes;
  args.to_layer_stride = to.stride(0) * bytes;
  args.from_page_stride = from.stride(1) * bytes;
  args.to_page_stride = to.stride(1) * bytes;
  args.page_ids = ids.data;
  args.num_rows = rows.data;
  args.count = ids.size;
  args.page_size = page_size;
  args.k_bytes = k_row * bytes;
  args.v_bytes = (row - k_row) * bytes;
  args.total_bytes = table.size(0) * ids.size * table.size(2) * bytes;
  const int64_t grain = std::max<int64_t>(1, kCopyGrainBytes / std::max<int64_t>(1, table.size(2) * bytes));
  torch::stable::parallel_for(0, table.size(0) * ids.size, grain, [&](int64_t begin, int64_t end) {
    (gather ? gather_pages : scatter_pages)(args, begin, end);
  });
}

void gather_pages_op(const Tensor& table, Tensor out, const Tensor& page_ids, const Tensor& num_rows,
                     int64_t k_row, int64_t page_size) {
  transfer("gather_pages", table, "out", out, page_ids, num_rows, k_row, page_size, true);
}

void scatter_pages_op(Tensor table, const Tensor& source, const Tensor& page_ids, const Tensor& num_rows,
                      int64_t k_row, int64_t page_size) {
  transfer("scatter_pages", table, "source", source, page_ids, num_rows, k_row, page_size, false);
}

// Checks that what a batch row says about itself can be read without leaving any tensor.
void check_rows(const char* op, const AttentionProblem& p, int64_t tokens, int64_t num_indices,
                int64_t pages) {
  CHECK_ARG(p.offsets[0] == 0, "offsets[0] is ", p.offsets[0], "; expected 0");
  CHECK_ARG(p.page_indptr[0] >= 0, "page_indptr[0] is ", p.page_indptr[0], "; it cannot be negative");
  for (int64_t b = 0; b < p.rows; ++b) {
    const int64_t dense = p.offsets[b + 1] - p.offsets[b];
    CHECK_ARG(dense >= 0, "offsets[", b + 1, "] is ", p.offsets[b + 1], ", below offsets[", b, "]");
    CHECK_ARG(p.num_candidates[b] >= 0 && p.num_candidates[b] <= dense, "num_candidates[", b, "] is ",
              p.num_candidates[b], "; row ", b, " has ", dense, " dense rows");
    CHECK_ARG(p.paged_lens[b] >= 0, "paged_lens[", b, "] is ", p.paged_lens[b], "; it cannot be negative");
    const int64_t first = p.page_indptr[b], last = p.page_indptr[b + 1];
    CHECK_ARG(last >= first && last <= num_indices, "page_indptr[", b + 1, "] is ", last, "; expected ",
              first, " to ", num_indices, ", the entries of page_indices");
    const int64_t needed = p.paged_lens[b] / p.page_size + (p.paged_lens[b] % p.page_size != 0);
    CHECK_ARG(needed <= last - first, "paged_lens[", b, "] is ", p.paged_lens[b], ", which needs ", needed,
              " pages; page_indptr gives row ", b, " ", last - first);
    for (int64_t i = first; i < first + needed; ++i) {
      CHECK_ARG(p.page_indices[i] >= 0 && p.page_indices[i] < pages, "page_indices[", i, "] is ",
                p.page_indices[i], "; the table has ", pages, " pages");
    }
  }
  CHECK_ARG(p.offsets[p.rows] == tokens, "offsets ends at ", p.offsets[p.rows], "; q has ", tokens,
            " token rows");
}

Tensor paged_hstu_attention_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& table,
                               int64_t layer, const Tensor& offsets, const Tensor& num_candidates,
                               const Tensor& paged_lens, const Tensor& page_indices,
                               const Tensor& page_indptr, int64_t page_size, double scale, double norm_len,
                               int64_t max_attn_len) {
  constexpr const char* op = "paged_hstu_attention";
  check_dim(op, "q", q, 3, "[tokens, heads, qk_dim]");
  check_dim(op, "v", v, 3, "[tokens, heads, v_dim]");
  const int64_t tokens = q.size(0), heads = q.size(1), qk_dim = q.size(2), v_dim = v.size(2);
  CHECK_ARG(k.dim() == 3 && k.size(0) == tokens && k.size(1) == heads && k.size(2) == qk_dim, "k has shape ",
            Shape{k}, "; expected that of q, ", Shape{q});
  CHECK_ARG(v.size(0) == tokens && v.size(1) == heads, "v has shape ", Shape{v}, "; expected [", tokens, ", ",
            heads, ", v_dim]");
  check_table(op, "table", table);
  CHECK_ARG(layer >= 0 && layer < table.size(0), "layer is ", layer, "; the table has ", table.size(0),
            " layers");
  check_page_size(op, page_size, table);
  const DType dtype = floating_dtype(op, "q", q);
  check_dtype(op, "k", k, q.scalar_type());
  check_dtype(op, "v", v, q.scalar_type());
  check_dtype(op, "table", table, q.scalar_type());
  const int64_t page_elements = page_size * heads * (qk_dim + v_dim);
  CHECK_ARG(table.size(2) == page_elements, "table has pages of ", table.size(2),
            " elements; page_size=", page_size, " token rows of k and v are ", page_elements);
  CHECK_ARG(norm_len > 0 && std::isfinite(norm_len), "norm_len is ", norm_len, "; it must be positive");
  CHECK_ARG(std::isfinite(scale), "scale is ", scale, "; it must be finite");
  CHECK_ARG(max_attn_len >= 0, "max_attn_len is ", max_attn_len, "; it must not be negative (0: no window)");
  const auto starts = indices<int64_t>(op, "offsets", offsets);
  const auto candidates = indices<int64_t>(op, "num_candidates", num_candidates);
  const auto paged = indices<int64_t>(op, "paged_lens", paged_lens);
  const auto pages = indices<int32_t>(op, "page_indices", page_indices);
  const auto indptr = indices<int32_t>(op, "page_indptr", page_indptr);
  CHECK_ARG(starts.size >= 1, "offsets is empty; expected batch size + 1 entries");
  const int64_t rows = starts.size - 1;
  CHECK_ARG(candidates.size == rows, "num_candidates has ", candidates.size, " entries; offsets says ", rows,
            " rows");
  CHECK_ARG(paged.size == rows, "paged_lens has ", paged.size, " entries; offsets says ", rows, " rows");
  CHECK_ARG(indptr.size == rows + 1, "page_indptr has ", indptr.size, " entries; expected ", rows + 1);

  const auto dense_heads = [](const Tensor& x) {
    return x.size(2) <= 1 || x.stride(2) == 1 ? x : torch::stable::contiguous(x);
  };
  const Tensor q_rows = dense_heads(q), k_rows = dense_heads(k), v_rows = dense_heads(v);
  AttentionProblem p{};
  p.dtype = dtype;
  p.q = q_rows.const_data_ptr();
  p.k = k_rows.const_data_ptr();
  p.v = v_rows.const_data_ptr();
  for (int i = 0; i < 2; ++i) {
    p.q_stride[i] = q_rows.stride(i);
    p.k_stride[i] = k_rows.stride(i);
    p.v_stride[i] = v_rows.stride(i);
  }
  p.table = static_cast<const char*>(table.const_data_ptr()) +
            layer * table.stride(0) * static_cast<int64_t>(table.element_size());
  p.page_stride = table.stride(1);
  p.offsets = starts.data;
  p.num_candidates = candidates.data;
  p.paged_lens = paged.data;
  p.page_indices = pages.data;
  p.page_indptr = indptr.data;
  p.rows = rows;
  p.heads = heads;
  p.qk_dim = qk_dim;
  p.v_dim = v_dim;
  p.page_size = page_size;
  p.scale = static_cast<float>(scale);
  p.norm_len = static_cast<float>(norm_len);
  p.max_attn_len = max_attn_len;
  check_rows(op, p, tokens, pages.size, table.size(1));

  Tensor out = torch::stable::new_empty(q, {tokens, heads, v_dim});
  p.out = out.mutable_data_ptr();
  AttentionPlan plan(p, static_cast<int>(torch::stable::get_num_threads()));
  // Threads take items from one queue, so that what matters is how many of them there are, not their ranges.
  torch::stable::parallel_for(0, plan.workers(), 1, [&](int64_t, int64_t) { plan.work(); });
  return out;
}

std::string cpu_isa_op() { return attention_isa(); }

}  // namespace
}  // namespace mtserve::kernels

STABLE_TORCH_LIBRARY(mtserve, m) {
  m.def("append_pages(Tensor(a!) table, int layer, Tensor k, Tensor v, Tensor slots, int page_size) -> ()");
  m.def(
      "gather_pages(Tensor table, Tensor(a!) out, Tensor page_ids, Tensor num_rows, int k_row, int "
      "page_size) -> ()");
  m.def(
      "scatter_pages(Tensor(a!) table, Tensor source, Tensor page_ids, Tensor num_rows, int k_row, int "
      "page_size) "
      "-> ()");
  m.def(
      "paged_hstu_attention(Tensor q, Tensor k, Tensor v, Tensor table, int layer, Tensor offsets, "
      "Tensor num_candidates, Tensor paged_lens, Tensor page_indices, Tensor page_indptr, int page_size, "
      "float scale, float norm_len, int max_attn_len) -> Tensor");
  m.def("cpu_isa() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(mtserve, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&mtserve::kernels::cpu_isa_op));
}

STABLE_TORCH_LIBRARY_IMPL(mtserve, CPU, m) {
  m.impl("append_pages", TORCH_BOX(&mtserve::kernels::append_pages_op));
  m.impl("gather_pages", TORCH_BOX(&mtserve::kernels::gather_pages_op));
  m.impl("scatter_pages", TORCH_BOX(&mtserve::kernels::scatter_pages_op));
  m.impl("paged_hstu_attention", TORCH_BOX(&mtserve::kernels::paged_hstu_attention_op));
}
