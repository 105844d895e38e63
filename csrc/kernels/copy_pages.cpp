#include "kernels/copy_pages.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace mtserve::kernels {
namespace {

// Transfers from this size on leave no cache useful anyway: stores past the caches spare reading the lines
// that they overwrite. (memcpy decides by the size of one call, which here is a page.)
constexpr int64_t kStreamBytes = 32 << 20;

void copy(const char* from, char* to, int64_t bytes, bool stream) {
#if defined(__SSE2__)
  if (stream && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    const int64_t lines = bytes / 64;
    for (int64_t i = 0; i < lines; ++i) {
      const auto* source = reinterpret_cast<const __m128i*>(from + 64 * i);
      auto* target = reinterpret_cast<__m128i*>(to + 64 * i);
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    from += 64 * lines;
    to += 64 * lines;
    bytes -= 64 * lines;
  }
#else
  (void)stream;
#endif
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

// Streaming stores become visible to other threads in order only behind a fence.
void finish(bool stream) {
#if defined(__SSE2__)
  if (stream) _mm_sfence();
#else
  (void)stream;
#endif
}

void copy_page(const TransferArgs& args, const char* from, char* to, int64_t rows, bool stream) {
  if (rows == args.page_size) return copy(from, to, rows * (args.k_bytes + args.v_bytes), stream);
  const int64_t v_offset = args.page_size * args.k_bytes;
  copy(from, to, rows * args.k_bytes, stream);
  copy(from + v_offset, to + v_offset, rows * args.v_bytes, stream);
}

template <class Copy>
void for_each_page(const TransferArgs& args, int64_t begin, int64_t end, Copy&& copy_one) {
  if (begin >= end) return;
  const bool stream = args.total_bytes >= kStreamBytes;
  int64_t layer = begin / args.count;
  int64_t entry = begin % args.count;
  for (int64_t i = begin; i < end; ++i) {
    if (args.page_ids[entry] >= 0 && args.num_rows[entry] > 0) copy_one(layer, entry, stream);
    if (++entry == args.count) {
      entry = 0;
      ++layer;
    }
  }
  finish(stream);
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
  for_each_page(args, begin, end, [&](int64_t layer, int64_t entry, bool stream) {
    const int64_t page = args.page_ids[entry];
    copy_page(args, args.from + layer * args.from_layer_stride + page * args.from_page_stride,
              args.to + layer * args.to_layer_stride + entry * args.to_page_stride, args.num_rows[entry],
              stream);
  });
}

void scatter_pages(const TransferArgs& args, int64_t begin, int64_t end) {
  for_each_page(args, begin, end, [&](int64_t layer, int64_t entry, bool stream) {
    const int64_t page = args.page_ids[entry];
    copy_page(args, args.from + layer * args.from_layer_stride + entry * args.from_page_stride,
              args.to + layer * args.to_layer_stride + page * args.to_page_stride, args.num_rows[entry],
              stream);
  });
}

}  // namespace mtserve::kernels
