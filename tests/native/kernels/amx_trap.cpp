#include "amx_trap.h"

#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct Tile {
  uint32_t rows[16][16];
};

struct State {
  bool configured = false;
  uint8_t rows[8];
  uint16_t row_bytes[8];
  Tile tiles[8];
};

thread_local State state;
std::atomic<int64_t> count{0};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::abort();
}

void configure(const uint8_t* bytes) {
  require(bytes[0] == 1, "only palette 1 is known");
  for (int i = 1; i < 16; ++i) require(bytes[i] == 0, "reserved bytes are not zero");
  for (int i = 32; i < 48; ++i) require(bytes[i] == 0, "row lengths of tiles that do not exist");
  for (int i = 56; i < 64; ++i) require(bytes[i] == 0, "rows of tiles that do not exist");
  state = {};
  for (int t = 0; t < 8; ++t) {
    std::memcpy(&state.row_bytes[t], bytes + 16 + 2 * t, 2);
    state.rows[t] = bytes[48 + t];
    require(state.row_bytes[t] <= 64 && state.rows[t] <= 16, "a tile is too large");
    require((state.row_bytes[t] == 0) == (state.rows[t] == 0), "a tile has rows but no columns, or columns alone");
  }
  state.configured = true;
}

Tile& tile(int t) {
  require(t < 8 && state.configured && state.rows[t] > 0, "the tile is not configured");
  return state.tiles[t];
}

float as_float(uint32_t bits) {
  // Subnormal numbers are zero; the sign stays.
  if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

float flush(float x) { return as_float(as_bits(x)); }

// Sums are float32, rounded to nearest even; the even and the odd terms are summed up apart.
void multiply(int sums, int left, int right) {
  require(sums != left && sums != right && left != right, "the tiles of a product are not three");
  const Tile &a = tile(left), &b = tile(right);
  Tile& c = tile(sums);
  const int depth = state.row_bytes[left] / 4, columns = state.row_bytes[sums] / 4;
  require(state.rows[sums] == state.rows[left] && state.row_bytes[right] == state.row_bytes[sums] &&
              state.rows[right] == depth,
          "the tiles of a product do not fit");
  for (int m = 0; m < state.rows[sums]; ++m) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < depth; ++k) {
      const float low = as_float(a.rows[m][k] << 16), high = as_float(a.rows[m][k] & 0xffff0000u);
      for (int n = 0; n < columns; ++n) {
        even[n] = flush(std::fmaf(low, as_float(b.rows[k][n] << 16), even[n]));
        odd[n] = flush(std::fmaf(high, as_float(b.rows[k][n] & 0xffff0000u), odd[n]));
      }
    }
    for (int n = 0; n < columns; ++n) c.rows[m][n] = as_bits(flush(as_float(c.rows[m][n]) + flush(even[n] + odd[n])));
  }
}

// An instruction's operand in memory, [base + index * scale + offset]; the index of a tile is the distance of its rows.
struct Operand {
  uint8_t* address = nullptr;
  int64_t index = 0;
  int length = 0;  // bytes of the encoding, from ModRM on
};

int64_t general_register(const greg_t* registers, int number) {
  constexpr int kPlaces[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                             REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return registers[kPlaces[number]];
}

Operand decode(const uint8_t* code, int high_base, int high_index, const greg_t* registers) {
  const int mode = code[0] >> 6, low = code[0] & 7;
  Operand operand;
  operand.length = 1;
  int64_t address = 0, offset = 0;
  bool wide = mode == 2;
  if (low == 4) {
    const int sib = code[operand.length++], index = (sib >> 3 & 7) + high_index;
    if (index != 4) operand.index = general_register(registers, index) * (int64_t{1} << (sib >> 6));
    if (mode == 0 && (sib & 7) == 5)
      wide = true;
    else
      address = general_register(registers, (sib & 7) + high_base);
  } else if (mode == 0 && low == 5) {
    wide = true;
    // From the end of the instruction, which has four bytes before ModRM.
    address = registers[REG_RIP] + 4 + operand.length + 4;
  } else {
    address = general_register(registers, low + high_base);
  }
  if (mode == 1) {
    offset = static_cast<int8_t>(code[operand.length++]);
  } else if (wide) {
    int32_t bytes;
    std::memcpy(&bytes, code + operand.length, sizeof bytes);
    offset = bytes;
    operand.length += 4;
  }
  operand.address = reinterpret_cast<uint8_t*>(address + offset);
  return operand;
}

// Does what the instruction does and returns its length, 0 if it is none of AMX.
int64_t perform(const uint8_t* code, const greg_t* registers) {
  // Three bytes of VEX for the map 0F38, 128 bits, W0.
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) return 0;
  const int prefix = code[2] & 3, second = (~code[2] >> 3) & 15, opcode = code[3];
  const bool in_registers = code[4] >> 6 == 3;
  const int first = (code[4] >> 3 & 7) + (code[1] & 0x80 ? 0 : 8), low = (code[4] & 7) + (code[1] & 0x20 ? 0 : 8);
  if (in_registers) {
    if (opcode == 0x49 && prefix == 0 && code[4] == 0xc0) {
      state = {};
    } else if (opcode == 0x49 && prefix == 3 && low == 0) {
      tile(first) = {};
    } else if (opcode == 0x5c && prefix == 2) {
      multiply(first, low, second);
    } else {
      return 0;
    }
    return 5;
  }
  const Operand operand = decode(code + 4, code[1] & 0x20 ? 0 : 8, code[1] & 0x40 ? 0 : 8, registers);
  if (opcode == 0x49 && prefix == 0 && first == 0) {
    configure(operand.address);
  } else if (opcode == 0x4b && prefix == 3) {
    tile(first) = {};
    for (int m = 0; m < state.rows[first]; ++m)
      std::memcpy(state.tiles[first].rows[m], operand.address + m * operand.index, state.row_bytes[first]);
  } else if (opcode == 0x4b && prefix == 2) {
    const Tile& source = tile(first);
    for (int m = 0; m < state.rows[first]; ++m)
      std::memcpy(operand.address + m * operand.index, source.rows[m], state.row_bytes[first]);
  } else {
    return 0;
  }
  return 4 + operand.length;
}

void handle(int, siginfo_t*, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const int64_t length = perform(reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers);
  // The instruction is met again.
  if (length == 0) signal(SIGILL, SIG_DFL);
  registers[REG_RIP] += length;
  count.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

void trap_amx() {
  struct sigaction action {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
}

int64_t trapped() { return count.load(std::memory_order_relaxed); }
