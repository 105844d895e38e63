#include "kernels/copy_pages.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace mtserve::kernels {
namespace {

// From this size on stores past the caches win, because they spare reading the lines that they overwrite, unless
// source and target lie in a cache already. (memcpy decides by the size of one call, which here is a page.)
constexpr int64_t kStreamBytes = 8 << 20;

// `ahead`: bytes from what is read now to what is fetched now; the hardware does not follow rows that lie apart.
void copy(const char* from, char* to, int64_t bytes, bool stream, int64_t ahead = 1024) {
#if defined(__SSE2__)
  if (stream && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    const int64_t lines = bytes / 64;
    for (int64_t i = 0; i < lines; ++i) {
      _mm_prefetch(from + 64 * i + ahead, _MM_HINT_NTA);
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
  (void)stream, (void)ahead;
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

// Rows that lie `stride` apart, to one behind the other.
void copy_rows(const char* from, int64_t stride, char* to, int64_t bytes, int64_t rows, bool stream) {
  if (stride == bytes) return copy(from, to, rows * bytes, stream);
  for (int64_t i = 0; i < rows; ++i) copy(from + i * stride, to + i * bytes, bytes, stream, 4 * stride);
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
  const bool stream = args.total_bytes >= kStreamBytes;
  for (int64_t t = begin; t < end;) {
    const int64_t slot = args.slots[t];
    if (slot < 0) {
      ++t;
      continue;
    }
    // A history's tokens follow each other in a page, so that most of them go together.
    const int64_t row = slot % args.page_size;
    int64_t rows = 1;
    while (t + rows < end && row + rows < args.page_size && args.slots[t + rows] == slot + rows) ++rows;
    char* page = args.table + slot / args.page_size * args.page_stride;
    copy_rows(args.k + t * args.k_stride, args.k_stride, page + row * args.k_bytes, args.k_bytes, rows, stream);
    copy_rows(args.v + t * args.v_stride, args.v_stride,
              page + args.page_size * args.k_bytes + row * args.v_bytes, args.v_bytes, rows, stream);
    t += rows;
  }
  finish(stream);
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
