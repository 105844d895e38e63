// A10: page ids and strides beyond 2^31 elements, and beyond 2^32 bytes. The memory is mapped, hardly any is touched.
#include <sys/mman.h>

#include <vector>

#include "check.h"
#include "engine/engine.h"
#include "engine/layout.h"
#include "tiers/host_arena.h"

using namespace mtserve;

namespace {

// The paper's page: 32 tokens, 4 heads of 128, two bytes.
constexpr int32_t kPageSize = 32, kChunk = 1024, kSlot = 128, kLayers = 2;
constexpr int64_t kRow = 4 * 128 * 2;
const Geometry kGeometry{kLayers, kPageSize, kSlot, kRow, kRow};

struct Mapped {
  std::byte* base;
  int64_t bytes;
  explicit Mapped(int64_t size) : bytes(size) {
    void* at = mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(at != MAP_FAILED);
    base = static_cast<std::byte*>(at);
  }
  ~Mapped() { munmap(base, static_cast<size_t>(bytes)); }
};

void page_addresses() {
  const int64_t pages = (int64_t{1} << 31) - 1, bytes = kGeometry.page_bytes();
  CHECK_EQ(bytes, int64_t{65536});
  // Never dereferenced: only the arithmetic counts.
  const DeviceTable table{nullptr, pages, bytes};
  const auto address = [&](int32_t layer, PageId page) { return reinterpret_cast<uintptr_t>(table.page(layer, page)); };
  CHECK_EQ(address(0, 70'000), uintptr_t{70'000} * 65536);
  CHECK_EQ(address(0, INT32_MAX - 1), uintptr_t{INT32_MAX - 1} * 65536);
  CHECK_EQ(address(7, INT32_MAX - 1), (uintptr_t{7} * pages + INT32_MAX - 1) * 65536);
}

void slot_numbers() {
  Batch batch;
  batch.pages = {INT32_MAX - 1, 5, 67'108'864};
  batch.rows.resize(1);
  batch.rows[0].tokens = 96;
  batch.rows[0].cached = 31;
  batch.rows[0].num_pages = 3;
  batch.rows[0].stores = true;
  std::vector<int64_t> out(65 + 2, 7);
  write_slots(batch, {2}, kPageSize, out.data());
  CHECK_EQ(out[0], (int64_t{INT32_MAX} - 1) * 32 + 31);
  CHECK_EQ(out[1], int64_t{5} * 32);
  CHECK_EQ(out[33], int64_t{67'108'864} * 32);  // 2^31
  CHECK_EQ(out[64], int64_t{67'108'864} * 32 + 31);
  CHECK_EQ(out[65], int64_t{-1});
  CHECK_EQ(out[66], int64_t{-1});
}

void far_blocks() {
  // 16 GiB of slots of 4 MiB.
  HostArena arena(kGeometry, 32'768);
  CHECK_EQ(kGeometry.slot_bytes(), int64_t{2} * 4 * 65536);
  CHECK_EQ(arena.capacity(), int64_t{32'768} * kGeometry.slot_bytes());
  std::vector<std::byte> page(65536), got(65536);
  const Block blocks[] = {{0, 0}, {8'192, 3}, {16'384, 3}, {32'760, 3}};
  for (const Block& block : blocks)
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      for (size_t i = 0; i < page.size(); ++i) page[i] = std::byte(block.slot / 8 + layer * 31 + i);
      const int32_t last = (4 << block.order) - 1;
      const PageRows rows{page.data(), last, 3, 32};
      arena.write(block, layer, std::span(&rows, 1));
    }
  for (const Block& block : blocks)
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      std::fill(got.begin(), got.end(), std::byte{0});
      const PageRows rows{got.data(), (4 << block.order) - 1, 3, 32};
      arena.read(block, layer, std::span(&rows, 1));
      for (int64_t i = 0; i < 32 * kRow; ++i) {
        const std::byte want = i < 3 * kRow ? std::byte{0} : std::byte(block.slot / 8 + layer * 31 + i);
        CHECK(got[i] == want && got[32 * kRow + i] == (i < 3 * kRow ? std::byte{0} : std::byte(block.slot / 8 + layer * 31 + 32 * kRow + i)));
      }
    }
}

// A user whose pages lie at the end of a table of 70,000 pages: a layer holds 2^31.1 elements.
void a_user_at_the_end_of_the_table() {
  constexpr int32_t kPages = 70'000, kFirst = 69'000;
  Mapped memory(int64_t{kLayers} * kPages * 65536);
  const DeviceTable table{memory.base, kPages, 65536};
  IndexConfig config;
  config.page_size = kPageSize;
  config.num_pages = kPages;
  config.chunk_tokens = kChunk;
  config.slot_tokens = kSlot;
  config.num_chunks = 8;
  for (const Strategy offload : {Strategy::direct, Strategy::staged}) {
    Engine engine(config, kGeometry, table, nullptr, nullptr, {Strategy::direct, offload});
    // The low pages belong to a batch that stays open.
    const RowRequest low{1, kFirst * kPageSize, 0, nullptr}, high{2, 1'100, 0, nullptr};
    Engine::OpenBatch holder;
    engine.begin(std::span(&low, 1), 0, 1, holder);
    CHECK_EQ(holder.batch.rows[0].num_pages, kFirst);
    const auto at = [&](const Batch& batch, int32_t layer, int32_t token) {
      const uintptr_t page = static_cast<uintptr_t>(batch.pages[token / kPageSize]);
      CHECK(page >= kFirst);
      return memory.base + (layer * uintptr_t{kPages} + page) * 65536 + token % kPageSize * kRow;
    };
    for (const int32_t cached : {0, 1'100}) {
      Engine::OpenBatch open;
      engine.begin(std::span(&high, 1), 0, 1, open);
      CHECK_EQ(open.batch.rows[0].cached, cached);
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        CHECK(engine.wait(open, layer));
        for (int32_t t = 0; t < 1'100; ++t)
          for (const int64_t v : {int64_t{0}, kPageSize * kRow}) {
            const uint64_t want = 1 + layer + 2 * t + 10'000 * (v != 0);
            if (cached == 0) {
              std::memcpy(at(open.batch, layer, t) + v, &want, sizeof want);
            } else {
              uint64_t got;
              std::memcpy(&got, at(open.batch, layer, t) + v, sizeof got);
              CHECK_EQ(got, want);
            }
          }
      }
      engine.commit(open);
      engine.flush();
      CHECK_EQ(engine.index().lengths(2, 1).host, 1'100);
      // Out of the device, and the pages poisoned.
      const RowRequest rest{3, (kPages - kFirst) * kPageSize, 0, nullptr};
      Engine::OpenBatch eviction;
      engine.begin(std::span(&rest, 1), 0, 1, eviction);
      CHECK_EQ(engine.index().lengths(2, 1).device, 0);
      for (int32_t t = 0; t < 1'200; ++t)
        for (int32_t layer = 0; layer < kLayers; ++layer) std::memset(at(eviction.batch, layer, t), 0xEE, 8);
      engine.abort(eviction);
    }
    engine.abort(holder);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"page addresses", page_addresses},
                    {"slot numbers", slot_numbers},
                    {"far blocks of the arena", far_blocks},
                    {"a user at the end of the table", a_user_at_the_end_of_the_table}});
}
