// Copies between tiers that leave the caches alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace mtserve {

// A page of this size or more is one of many: what a transfer moves fits into no near cache, and whoever reads it does
// so on another core. Stores past the caches spare reading the lines that they overwrite, a third of all traffic; the
// C library's memcpy does the same only for single calls of many MiB. Smaller pieces go through the caches.
inline constexpr size_t kStreamFrom = 16 << 10;

// Like memcpy. What it wrote is visible to whoever is told of it afterwards, as with ordinary stores.
inline void copy_past_caches(std::byte* to, const std::byte* from, size_t bytes) {
#if defined(__SSE2__)
  constexpr size_t kLine = 64;
  constexpr size_t kAhead = 16 * kLine;  // the hardware's prefetchers stop at every 4 KiB
  if (bytes >= kStreamFrom) {
    const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
    std::memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    for (; bytes >= kLine; bytes -= kLine, to += kLine, from += kLine) {
      _mm_prefetch(reinterpret_cast<const char*>(from) + kAhead, _MM_HINT_NTA);
      const auto* source = reinterpret_cast<const __m128i*>(from);
      auto* target = reinterpret_cast<__m128i*>(to);
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace mtserve
