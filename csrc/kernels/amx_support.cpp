#include "kernels/amx_support.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace mtserve::kernels {
namespace {

// Of <asm/prctl.h>, which older systems have without them.
constexpr long kGetPermission = 0x1022;
constexpr long kRequestPermission = 0x1023;
constexpr long kTileData = 18;

bool processor_has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kSavesStates = 1u << 27, kBf16 = 1u << 22, kTiles = 1u << 24;
  if (!__get_cpuid_count(1, 0, &a, &b, &c, &d) || (c & kSavesStates) == 0) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTiles) == 0) return false;
  // What palette 1 has to be: rows of 64 bytes, eight tiles, 16 rows.
  if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d)) return false;
  if ((b & 0xffff) != 64 || b >> 16 != 8 || (c & 0xffff) != 16) return false;
  unsigned saved = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  constexpr unsigned kTileStates = 3u << 17;
  return (saved & kTileStates) == kTileStates;
}

}  // namespace

bool request_amx() {
  if (!processor_has_amx()) return false;
  uint64_t granted = 0;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 &&
         syscall(SYS_arch_prctl, kGetPermission, &granted) == 0 && (granted >> kTileData & 1) != 0;
}

}  // namespace mtserve::kernels
#else
namespace mtserve::kernels {
bool request_amx() { return false; }
}  // namespace mtserve::kernels
#endif
