// The CUDA page kernels, compiled for the CPU: every thread of every block runs in turn, in shuffled order. They use no
// barrier and no shuffle, so no order may matter.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

struct Dim {
  unsigned x = 0, y = 0;
};
static Dim blockIdx, threadIdx, gridDim, blockDim;
#define __global__
#define __device__

#include "cuda/page_kernels.cuh"
#include "cuda/piece_copy.cuh"

#include "check.h"

using namespace mtserve::cuda;

namespace {

std::mt19937_64 generator(7);

int64_t pick(int64_t least, int64_t most) { return least + static_cast<int64_t>(generator() % (most - least + 1)); }

template <class Kernel>
void launch(unsigned blocks, unsigned threads, Kernel kernel) {
  std::vector<std::pair<unsigned, unsigned>> order;
  for (unsigned b = 0; b < blocks; ++b)
    for (unsigned t = 0; t < threads; ++t) order.push_back({b, t});
  std::shuffle(order.begin(), order.end(), generator);
  gridDim.x = blocks;
  blockDim.x = threads;
  for (const auto& [b, t] : order) {
    blockIdx.x = b;
    threadIdx.x = t;
    kernel();
  }
}

template <class Unit>
std::vector<Unit> noise(int64_t n) {
  std::vector<Unit> out(static_cast<size_t>(n));
  for (Unit& x : out) x = static_cast<Unit>(generator());
  return out;
}

// Makes one entry point outside [0, end), at times; returns which, or -1.
template <class Entry>
int64_t spoil(std::vector<Entry>& entries, int64_t end) {
  if (entries.empty() || pick(0, 2) > 0) return -1;
  const int64_t which = pick(0, static_cast<int64_t>(entries.size()) - 1);
  const Entry wrong[] = {static_cast<Entry>(end), static_cast<Entry>(end + pick(1, 1000)), static_cast<Entry>(-2 - pick(0, 1000)),
                         std::numeric_limits<Entry>::max(), std::numeric_limits<Entry>::min()};
  entries[static_cast<size_t>(which)] = wrong[pick(0, 4)];
  return which;
}

template <class Unit>
void append_matches() {
  const int64_t pages = pick(1, 6), rows = pick(0, 12);
  const PageShape shape{pick(1, 5), pick(1, 9), pick(1, 9), pages};
  const int64_t page = shape.page_size * (shape.k_row + shape.v_row);
  const int64_t k_stride = shape.k_row + pick(0, 3), v_stride = shape.v_row + pick(0, 3);
  const auto k = noise<Unit>(rows * k_stride), v = noise<Unit>(rows * v_stride);
  std::vector<int64_t> free_slots(pages * shape.page_size), slots(rows);
  for (size_t i = 0; i < free_slots.size(); ++i) free_slots[i] = static_cast<int64_t>(i);
  std::shuffle(free_slots.begin(), free_slots.end(), generator);
  for (int64_t t = 0; t < rows; ++t) {
    slots[t] = pick(0, 3) == 0 || free_slots.empty() ? -1 : free_slots.back();
    if (slots[t] >= 0) free_slots.pop_back();
  }
  const int64_t wrong = spoil(slots, pages * shape.page_size);
  auto table = noise<Unit>(pages * page);
  auto expected = table;
  for (int64_t t = 0; t < rows; ++t) {
    if (slots[t] < 0 || t == wrong) continue;
    const int64_t at = slots[t] / shape.page_size * page, row = slots[t] % shape.page_size;
    for (int64_t i = 0; i < shape.k_row; ++i) expected[at + row * shape.k_row + i] = k[t * k_stride + i];
    for (int64_t i = 0; i < shape.v_row; ++i) expected[at + shape.page_size * shape.k_row + row * shape.v_row + i] = v[t * v_stride + i];
  }
  int64_t told = -1;
  int64_t* const bad = pick(0, 1) == 0 ? nullptr : &told;
  launch(static_cast<unsigned>(pick(1, 4)), static_cast<unsigned>(pick(1, 7)),
         [&] { append_pages<Unit>(table.data(), k.data(), v.data(), slots.data(), rows, k_stride, v_stride, shape, bad); });
  CHECK(table == expected);
  CHECK_EQ(told, bad == nullptr ? -1 : wrong);
}

struct alignas(16) Wide {
  uint64_t a, b;
};

// Rows of any number of bytes at any address, in the unit that is chosen for them.
void append_fits_any_alignment() {
  const int64_t step = int64_t{1} << pick(0, 4), pages = pick(1, 4), rows = pick(1, 6);
  const PageShape bytes{pick(1, 4), step * pick(1, 5), step * pick(1, 5), pages};
  const int64_t k_stride = bytes.k_row + step * pick(0, 2), v_stride = bytes.v_row + step * pick(0, 2);
  const int64_t page = bytes.page_size * (bytes.k_row + bytes.v_row), at_table = step * pick(0, 3), at_k = step * pick(0, 3);
  alignas(16) unsigned char table[8192], k[4096], v[4096], expected[8192];
  for (unsigned char& x : k) x = static_cast<unsigned char>(generator());
  for (unsigned char& x : v) x = static_cast<unsigned char>(generator());
  std::fill_n(table, sizeof table, 0xEE);
  std::copy_n(table, sizeof table, expected);
  std::vector<int64_t> slots(static_cast<size_t>(std::min(rows, pages * bytes.page_size)));
  for (size_t t = 0; t < slots.size(); ++t) {
    slots[t] = static_cast<int64_t>(t);
    unsigned char* to = expected + at_table + slots[t] / bytes.page_size * page;
    const int64_t row = slots[t] % bytes.page_size;
    std::copy_n(k + at_k + static_cast<int64_t>(t) * k_stride, bytes.k_row, to + row * bytes.k_row);
    std::copy_n(v + static_cast<int64_t>(t) * v_stride, bytes.v_row, to + bytes.page_size * bytes.k_row + row * bytes.v_row);
  }
  const auto address = [](const unsigned char* x) { return reinterpret_cast<uint64_t>(x); };
  const int unit = unit_bytes(address(table + at_table) | address(k + at_k) | address(v) | static_cast<uint64_t>(bytes.k_row | bytes.v_row | k_stride | v_stride));
  CHECK(unit >= step);
  const auto run = [&](auto sample) {
    using Unit = decltype(sample);
    constexpr int64_t size = sizeof(Unit);
    launch(2, 3, [&] {
      append_pages<Unit>(reinterpret_cast<Unit*>(table + at_table), reinterpret_cast<const Unit*>(k + at_k), reinterpret_cast<const Unit*>(v), slots.data(),
                         static_cast<int64_t>(slots.size()), k_stride / size, v_stride / size,
                         {bytes.page_size, bytes.k_row / size, bytes.v_row / size, pages}, nullptr);
    });
  };
  unit == 16 ? run(Wide{}) : unit == 8 ? run(uint64_t{}) : unit == 4 ? run(uint32_t{}) : unit == 2 ? run(uint16_t{}) : run(uint8_t{});
  CHECK(std::equal(table, table + sizeof table, expected));
}

template <class Unit, bool to_table>
void move_matches() {
  const int64_t pages = pick(1, 8), layers = pick(1, 3), n = pick(0, pages);
  const PageShape shape{pick(1, 5), pick(1, 9), pick(1, 9), pages};
  const int64_t page = shape.page_size * (shape.k_row + shape.v_row);
  const int64_t table_stride = pages * page + pick(0, 2), buffer_stride = n * page + pick(0, 2);
  auto table = noise<Unit>(layers * table_stride), buffer = noise<Unit>(layers * buffer_stride);
  std::vector<int32_t> ids(pages), counts(n);
  for (int64_t i = 0; i < pages; ++i) ids[i] = static_cast<int32_t>(i);
  std::shuffle(ids.begin(), ids.end(), generator);
  ids.resize(n);
  for (int64_t i = 0; i < n; ++i) {
    if (pick(0, 4) == 0) ids[i] = -1;
    counts[i] = static_cast<int32_t>(pick(0, shape.page_size));
  }
  const int64_t wrong = pick(0, 1) == 0 ? spoil(ids, pages) : spoil(counts, shape.page_size + 1);
  auto expected_table = table, expected_buffer = buffer;
  for (int64_t layer = 0; layer < layers; ++layer)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t at = 0; ids[i] >= 0 && i != wrong && at < page; ++at) {
        const bool in_k = at < shape.page_size * shape.k_row;
        const int64_t row = in_k ? at / shape.k_row : (at - shape.page_size * shape.k_row) / shape.v_row;
        if (row >= counts[i]) continue;
        const int64_t t = layer * table_stride + ids[i] * page + at, b = layer * buffer_stride + i * page + at;
        (to_table ? expected_table[t] : expected_buffer[b]) = to_table ? buffer[b] : table[t];
      }
  int64_t told = -1;
  int64_t* const bad = pick(0, 1) == 0 ? nullptr : &told;
  launch(static_cast<unsigned>(pick(1, 4)), static_cast<unsigned>(pick(1, 7)), [&] {
    move_pages<Unit, to_table>(table.data(), buffer.data(), ids.data(), counts.data(), n, layers, table_stride, buffer_stride, shape, bad);
  });
  CHECK_EQ(told, bad == nullptr ? -1 : wrong);
  CHECK(table == expected_table);
  CHECK(buffer == expected_buffer);
}

void rounds(void (*test)()) {
  for (int round = 0; round < (quick ? 100 : 1000); ++round) test();
}

// Runs of any length and alignment; the bytes around them stay.
void runs_of_bytes_match() {
  std::vector<unsigned char> from = noise<unsigned char>(6000), to(6000, 0xEE), want = to;
  Runs runs;
  const int n = static_cast<int>(pick(1, 5));
  for (int i = 0; i < n; ++i) {
    const int64_t step = pick(0, 1) == 0 ? 16 : 1;
    const int64_t bytes = pick(0, 700), source = pick(0, 4000 / step) * step, target = i * 1200 + pick(0, 400 / step) * step;
    runs.run[i] = {to.data() + target, from.data() + source, bytes};
    std::copy_n(from.begin() + source, bytes, want.begin() + target);
  }
  for (int i = 0; i < n; ++i) {
    blockIdx.y = static_cast<unsigned>(i);
    launch(static_cast<unsigned>(pick(1, 3)), 8, [&] { copy_runs<Wide>(runs); });
  }
  blockIdx.y = 0;
  CHECK(to == want);
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"append, 2-byte units", [] { rounds(append_matches<uint16_t>); }},
                    {"append, 8-byte units", [] { rounds(append_matches<uint64_t>); }},
                    {"append at any alignment", [] { rounds(append_fits_any_alignment); }},
                    {"gather", [] { rounds(move_matches<uint32_t, false>); }},
                    {"scatter", [] { rounds(move_matches<uint32_t, true>); }},
                    {"runs of bytes", [] { rounds(runs_of_bytes_match); }}});
}
