#include "kernels/copy_pages.h"

#include <cstring>

namespace mtserve::kernels {
namespace {

void copy_page(const TransferArgs& args, const char* from, char* to, int64_t rows) {
  if (rows == args.page_size) {
    std::memcpy(to, from, static_cast<size_t>(rows * (args.k_bytes + args.v_bytes)));
    return;
  }
  const int64_t v_offset = args.page_size * args.k_bytes;
  std::memcpy(to, from, static_cast<size_t>(rows * args.k_bytes));
  std::memcpy(to + v_offset, from + v_offset, static_cast<size_t>(rows * args.v_bytes));
}

template <class Copy>
void for_each_page(const TransferArgs& args, int64_t begin, int64_t end, Copy&& copy) {
  if (begin >= end) return;
  int64_t layer = begin / args.count;
  int64_t entry = begin % args.count;
  for (int64_t i = begin; i < end; ++i) {
    if (args.page_ids[entry] >= 0 && args.num_rows[entry] > 0) copy(layer, entry);
    if (++entry == args.count) {
      entry = 0;
      ++layer;
    }
  }
}

}  // namespace

void append_pages(const AppendArgs& args, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const int64_t slot = args.slots[t];
    if (slot < 0) continue;
    const int64_t row = slot % args.page_size;
    char* page = args.table + slot / args.page_size * args.page_stride;
    std::memcpy(page + row * args.k_bytes, args.k + t * args.k_stride, static_cast<size_t>(args.k_bytes));
    std::memcpy(page + args.page_size * args.k_bytes + row * args.v_bytes, args.v + t * args.v_stride,
                static_cast<size_t>(args.v_bytes));
  }
}

void gather_pages(const TransferArgs& args, int64_t begin, int64_t end) {
  for_each_page(args, begin, end, [&](int64_t layer, int64_t entry) {
    const int64_t page = args.page_ids[entry];
    copy_page(args, args.from + layer * args.from_layer_stride + page * args.from_page_stride,
              args.to + layer * args.to_layer_stride + entry * args.to_page_stride, args.num_rows[entry]);
  });
}

void scatter_pages(const TransferArgs& args, int64_t begin, int64_t end) {
  for_each_page(args, begin, end, [&](int64_t layer, int64_t entry) {
    const int64_t page = args.page_ids[entry];
    copy_page(args, args.from + layer * args.from_layer_stride + entry * args.from_page_stride,
              args.to + layer * args.to_layer_stride + page * args.to_page_stride, args.num_rows[entry]);
  });
}

}  // namespace mtserve::kernels
