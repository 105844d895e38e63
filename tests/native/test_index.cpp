// What the index says about time: a freed page carries its last use, its next writer learns of it (ownership rules 1 and
// 3), and one index serves many threads.
#include <atomic>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "index/index.h"

using namespace mtserve;

namespace {

IndexConfig config(int32_t pages, int32_t chunks) {
  IndexConfig c;
  c.page_size = 4;
  c.num_pages = pages;
  c.chunk_tokens = 16;
  c.slot_tokens = 4;
  c.num_chunks = chunks;
  return c;
}

struct Planned {
  Batch batch;
  std::vector<TransferTask> onloads;
};

Planned begin(Index& index, int64_t user, int32_t tokens) {
  Planned out;
  const RowRequest request{user, tokens, 0, nullptr};
  index.begin(std::span(&request, 1), 0, 1, out.batch, out.onloads);
  return out;
}

Fence commit(Index& index, Planned& planned, std::vector<TransferTask>* offloads = nullptr) {
  std::vector<TransferTask> tasks;
  const Fence fence = index.commit(planned.batch, tasks);
  if (offloads != nullptr) offloads->insert(offloads->end(), tasks.begin(), tasks.end());
  return fence;
}

void finish(Index& index, std::vector<TransferTask> tasks) {
  while (!tasks.empty()) {
    const TransferTask task = tasks.back();
    tasks.pop_back();
    index.offload_done(task, true, tasks);
  }
}

void pages_carry_their_last_use() {
  Index index(config(10, 0));
  Planned first = begin(index, 1, 40);
  CHECK_EQ(first.batch.after, Fence{0});
  commit(index, first);
  Planned reader = begin(index, 1, 40);
  const Fence last = commit(index, reader);
  const int64_t gone = 1;
  index.evict(std::span(&gone, 1));
  // Whoever gets any of these pages next must come after the last reader.
  Planned next = begin(index, 2, 1);
  CHECK(next.batch.after >= last);
  Fence end = index.abort(next.batch, false);
  CHECK(end > last);
  Planned all = begin(index, 3, 40);
  CHECK(all.batch.after >= end);
  index.abort(all.batch, false);
}

void pages_of_an_aborted_batch_too() {
  Index index(config(10, 0));
  Planned writer = begin(index, 1, 40);
  const Fence aborted = index.abort(writer.batch, false);
  Planned next = begin(index, 2, 40);
  CHECK(next.batch.after >= aborted);
  index.abort(next.batch, false);
}

void evicted_pages_too() {
  Index index(config(10, 4));
  std::vector<TransferTask> offloads;
  Planned first = begin(index, 1, 40);
  commit(index, first, &offloads);
  finish(index, std::move(offloads));
  Planned reader = begin(index, 1, 39);  // a reader of another length: cuts, reads
  const Fence last = commit(index, reader);
  Planned next = begin(index, 2, 40);
  CHECK(next.batch.after >= last);
  index.abort(next.batch, false);
}

void committed_rows_come_after_their_writer() {
  Index index(config(20, 0));
  Planned writer = begin(index, 1, 20);
  const Fence written = commit(index, writer);
  Planned reader = begin(index, 1, 25);
  CHECK_EQ(reader.batch.rows[0].cached, 20);
  CHECK(reader.batch.after >= written);
  index.abort(reader.batch, false);
}

void onloads_come_after_the_last_use_of_their_pages() {
  Index index(config(10, 8));
  std::vector<TransferTask> offloads;
  Planned first = begin(index, 1, 32);
  commit(index, first, &offloads);
  finish(index, std::move(offloads));
  Planned other = begin(index, 2, 40);  // evicts user 1
  const Fence last = index.abort(other.batch, false);
  Planned back = begin(index, 1, 32);
  CHECK_EQ(back.onloads.size(), size_t{1});
  CHECK(back.onloads[0].after >= last);
  std::vector<TransferTask> next;
  index.onload_done(back.onloads[0], true, next);
  index.abort(back.batch, false);

  Planned again = begin(index, 2, 40);
  const Fence later = index.abort(again.batch, false);
  std::vector<TransferTask> tasks;
  const int64_t user = 1;
  index.prefetch(std::span(&user, 1), 1, tasks);
  CHECK_EQ(tasks.size(), size_t{1});
  CHECK(tasks[0].after >= later);
  index.onload_done(tasks[0], true, next);
  CHECK(next.empty());
}

// A batch that reads what an onload brings depends on it, whoever started it, until it is reported.
void loads_are_shared() {
  Index index(config(20, 8));
  std::vector<TransferTask> offloads;
  Planned first = begin(index, 1, 32);
  commit(index, first, &offloads);
  finish(index, std::move(offloads));
  Planned other = begin(index, 2, 80);
  index.abort(other.batch, false);
  std::vector<TransferTask> tasks;
  const int64_t user = 1;
  index.prefetch(std::span(&user, 1), 1, tasks);
  CHECK_EQ(tasks.size(), size_t{1});
  Planned a = begin(index, 1, 40), b = begin(index, 1, 32);
  CHECK(a.onloads.empty() && b.onloads.empty());
  CHECK(a.batch.loads == std::vector<Ticket>{tasks[0].ticket});
  CHECK(b.batch.loads == a.batch.loads);
  CHECK_EQ(a.batch.rows[0].cached, 32);
  // The writer commits behind the load that is still not reported: the next reader depends on it as well.
  commit(index, a);
  Planned c = begin(index, 1, 40);
  CHECK_EQ(c.batch.rows[0].cached, 40);
  CHECK(c.batch.loads == b.batch.loads);
  std::vector<TransferTask> next;
  index.onload_done(tasks[0], true, next);
  index.abort(b.batch, false);
  index.abort(c.batch, false);
  Planned d = begin(index, 1, 40);
  CHECK(d.batch.loads.empty());
  CHECK_EQ(d.batch.rows[0].cached, 40);
  index.abort(d.batch, false);
  CHECK(index.check().empty());
}

// Who reads nothing of what is on its way does not wait for it.
void loads_are_not_waited_for_by_others() {
  Index index(config(20, 8));
  std::vector<TransferTask> offloads;
  Planned first = begin(index, 1, 32);
  commit(index, first, &offloads);
  finish(index, std::move(offloads));
  Planned other = begin(index, 2, 64);  // takes 16 of 20 pages: half of the user's stay
  index.abort(other.batch, false);
  CHECK_EQ(index.lengths(1, 1).device, 16);
  const int64_t user = 1;
  std::vector<TransferTask> tasks;
  index.prefetch(std::span(&user, 1), 1, tasks);
  CHECK_EQ(tasks[0].first, 16);
  Planned behind = begin(index, 1, 17), before = begin(index, 1, 16);
  CHECK_EQ(behind.batch.rows[0].cached, 17);
  CHECK(behind.batch.loads == std::vector<Ticket>{tasks[0].ticket});
  CHECK_EQ(before.batch.rows[0].cached, 16);
  CHECK(before.batch.loads.empty());
  // That it fails concerns only those who read it.
  std::vector<TransferTask> next;
  index.onload_done(tasks[0], false, next);
  index.abort(before.batch, false);
  index.abort(behind.batch, false);
  CHECK_EQ(index.lengths(1, 1).committed, 16);
  CHECK(index.check().empty());
}

// Tokens that the host has no room for leave in their turn: else cold users would hold their pages against hot ones.
void what_cannot_be_kept_leaves_in_its_turn() {
  IndexConfig small = config(10, 1);
  small.tail_write_back = false;
  Index index(small);
  for (const int64_t user : {1, 2}) {  // the second takes the host from the first
    std::vector<TransferTask> offloads;
    Planned store = begin(index, user, 16);
    commit(index, store, &offloads);
    finish(index, std::move(offloads));
  }
  CHECK_EQ(index.lengths(1, 1).host, 0);
  CHECK_EQ(index.lengths(2, 1).host, 16);
  Planned third = begin(index, 3, 16);  // two pages are free
  CHECK(third.batch.rows[0].stores);
  index.abort(third.batch, false);
  CHECK_EQ(index.lengths(1, 1).device, 8);
  CHECK_EQ(index.lengths(2, 1).device, 16);
  CHECK_EQ(index.counters().lost_tokens, uint64_t{8});
  // What can still be written goes last, however cold.
  Planned written = begin(index, 1, 12);
  commit(index, written);
  Planned read = begin(index, 2, 16);
  commit(index, read);
  Planned all = begin(index, 4, 28);
  CHECK(all.batch.rows[0].stores);
  index.abort(all.batch, false);
  CHECK_EQ(index.lengths(1, 1).device, 12);
  CHECK_EQ(index.lengths(2, 1).device, 0);
  CHECK(index.check().empty());
}

// Fences of pages under random traffic: after each begin, `after` covers the last use of each page it got.
void fences_under_random_traffic() {
  std::mt19937 random(11);
  for (int round = 0; round < (quick ? 20 : 100); ++round) {
    const int32_t pages = 8 + static_cast<int32_t>(random() % 30);
    Index index(config(pages, round % 2 == 0 ? 0 : 30));
    std::vector<Fence> last_use(pages, 0), last_write(pages, 0);
    std::vector<Planned> open;
    std::vector<TransferTask> onloads, offloads;
    for (int step = 0; step < 300; ++step) {
      if (open.size() < 4 && random() % 2 == 0) {
        Planned planned = begin(index, random() % 5, static_cast<int32_t>(random() % 40));
        const BatchRow& row = planned.batch.rows[0];
        for (const TransferTask& task : planned.onloads) {
          for (const PageId page : task.pages) {
            CHECK(task.after >= last_use[page]);
            last_write[page] = 0;  // whoever reads it waits for the load, which waited for the writer before
          }
          onloads.push_back(task);
        }
        for (int32_t i = 0; i < row.num_pages; ++i) {
          const PageId page = planned.batch.pages[i];
          // A page is not read before it was written, and not written anew before its last use is over.
          if (i * 4 < row.cached)
            CHECK(planned.batch.after >= last_write[page]);
          else
            CHECK(planned.batch.after >= last_use[page]);
        }
        open.push_back(std::move(planned));
      } else if (!open.empty() && random() % 2 == 0) {
        std::swap(open[random() % open.size()], open.back());
        Planned planned = std::move(open.back());
        open.pop_back();
        std::vector<TransferTask> tasks;
        const Fence fence = random() % 3 == 0 ? index.abort(planned.batch, false) : index.commit(planned.batch, tasks);
        offloads.insert(offloads.end(), tasks.begin(), tasks.end());
        const BatchRow& row = planned.batch.rows[0];
        for (int32_t i = 0; i < row.num_pages; ++i) {
          const PageId page = planned.batch.pages[i];
          last_use[page] = fence;
          if (row.stores && (i + 1) * 4 > row.cached) last_write[page] = fence;
        }
      } else if (!onloads.empty() && random() % 2 == 0) {
        index.onload_done(onloads.back(), true, offloads);
        onloads.pop_back();
      } else if (!offloads.empty()) {
        const TransferTask task = offloads.back();
        offloads.pop_back();
        index.offload_done(task, true, offloads);
      } else if (random() % 10 == 0) {
        const int64_t user = random() % 5;
        index.evict(std::span(&user, 1));
      }
      CHECK(index.check().empty());
    }
    for (Planned& planned : open) index.abort(planned.batch, false);
  }
}

void many_threads() {
  Index index(config(40, 20));
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::vector<TransferTask> onloads, offloads;
  std::atomic<int> running{3};
  for (int thread = 0; thread < 3; ++thread)
    threads.emplace_back([&, thread] {
      std::mt19937 random(thread);
      for (int step = 0; step < (quick ? 2'000 : 20'000); ++step) {
        const int64_t user = random() % 8;
        if (random() % 40 == 0) index.evict(std::span(&user, 1));
        if (random() % 400 == 0) index.clear();
        Planned planned = begin(index, user, 10 + static_cast<int32_t>(random() % 30));
        std::vector<TransferTask> tasks;
        if (random() % 4 == 0)
          index.abort(planned.batch, false);
        else
          index.commit(planned.batch, tasks);
        (void)index.lengths(user, 1);
        (void)index.counters();
        std::lock_guard lock(mutex);
        onloads.insert(onloads.end(), planned.onloads.begin(), planned.onloads.end());
        offloads.insert(offloads.end(), tasks.begin(), tasks.end());
      }
      --running;
    });
  threads.emplace_back([&] {
    for (;;) {
      const bool last = running == 0;
      std::vector<TransferTask> in, out, next;
      {
        std::lock_guard lock(mutex);
        in.swap(onloads);
        out.swap(offloads);
      }
      for (const TransferTask& task : in) index.onload_done(task, true, next);
      for (const TransferTask& task : out) index.offload_done(task, true, next);
      CHECK(index.check().empty());
      std::lock_guard lock(mutex);
      offloads.insert(offloads.end(), next.begin(), next.end());
      if (last && offloads.empty()) break;
    }
  });
  for (std::thread& thread : threads) thread.join();
  index.clear();
  const Gauges g = index.gauges();
  CHECK_EQ(g.pages_free, g.pages_total);
  CHECK_EQ(g.slots_free, g.slots_total);
  CHECK_EQ(g.transfers_in_flight + g.open_batches + g.entries, int64_t{0});
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"pages carry their last use", pages_carry_their_last_use},
                    {"pages of an aborted batch too", pages_of_an_aborted_batch_too},
                    {"evicted pages too", evicted_pages_too},
                    {"committed rows come after their writer", committed_rows_come_after_their_writer},
                    {"onloads come after the last use of their pages", onloads_come_after_the_last_use_of_their_pages},
                    {"loads are shared", loads_are_shared},
                    {"loads are not waited for by others", loads_are_not_waited_for_by_others},
                    {"what cannot be kept leaves in its turn", what_cannot_be_kept_leaves_in_its_turn},
                    {"fences under random traffic", fences_under_random_traffic},
                    {"many threads", many_threads}});
}
