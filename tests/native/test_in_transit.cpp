// Tokens that an offload has read from the pages and not yet written to the host: their user is not pinned and may lose
// its pages, yet its host blocks, its content and its tail are spoken for.
#include <span>
#include <vector>

#include "check.h"
#include "index/index.h"

using namespace mtserve;

namespace {

using Tasks = std::vector<TransferTask>;

struct Planned {
  Batch batch;
  Tasks onloads;
};

Planned begin(Index& index, int64_t user, int32_t tokens, const std::vector<uint64_t>* hashes = nullptr) {
  Planned out;
  const RowRequest request{user, tokens, 0, hashes == nullptr ? nullptr : hashes->data()};
  index.begin(std::span(&request, 1), 0, 1, out.batch, out.onloads);
  return out;
}

Tasks store(Index& index, int64_t user, int32_t tokens, const std::vector<uint64_t>* hashes = nullptr) {
  Planned planned = begin(index, user, tokens, hashes);
  CHECK(planned.batch.rows[0].stores);
  Tasks offloads;
  index.commit(planned.batch, offloads);
  return offloads;
}

// The one task that was planned, read from the pages.
TransferTask gathered(Index& index, const Tasks& offloads) {
  CHECK_EQ(offloads.size(), size_t{1});
  index.offload_gathered(offloads[0]);
  return offloads[0];
}

void done(Index& index, const TransferTask& task) {
  Tasks next;
  index.offload_done(task, true, next);
  CHECK(next.empty());
}

void take_every_page(Index& index, int32_t pages) {
  Planned other = begin(index, 1'000, pages * 4);
  CHECK(other.batch.rows[0].stores);
  index.abort(other.batch, false);
}

IndexConfig config(int32_t pages, int32_t chunks) {
  return {.page_size = 4, .num_pages = pages, .chunk_tokens = 16, .slot_tokens = 4, .num_chunks = chunks, .tail_write_back = false};
}

void content_that_was_edited_meanwhile_is_not_published() {
  Index index(config(5, 4));
  const std::vector<uint64_t> before(16, 1), after(16, 2);
  const TransferTask task = gathered(index, store(index, 1, 16, &before));
  take_every_page(index, 5);
  Planned edited = begin(index, 1, 16, &after);
  CHECK_EQ(edited.batch.rows[0].cached, 0);
  Tasks offloads;
  index.commit(edited.batch, offloads);
  done(index, task);
  CHECK(index.lengths(1, 1).host <= 0);
  CHECK(index.check().empty());
}

void its_host_blocks_are_no_victims() {
  Index index(config(40, 3));
  done(index, gathered(index, store(index, 1, 16)));
  const TransferTask task = gathered(index, store(index, 1, 32));
  CHECK_EQ(task.first, 16);
  done(index, gathered(index, store(index, 2, 16)));
  // The host is full, and the user in transit is the coldest.
  CHECK_EQ(store(index, 3, 16).size(), size_t{1});
  CHECK_EQ(index.lengths(1, 1).host, 16);
  CHECK_EQ(index.lengths(2, 1).host, 0);
  done(index, task);
  CHECK_EQ(index.lengths(1, 1).host, 32);
  CHECK(index.check().empty());
}

void its_old_tail_is_not_read_while_it_is_replaced() {
  Index index(config(5, 4));
  CHECK(store(index, 1, 6).empty());
  Tasks tails;
  index.plan_flush(tails);
  done(index, gathered(index, tails));
  const TransferTask task = gathered(index, store(index, 1, 16));
  CHECK_EQ(task.first, 0);
  take_every_page(index, 5);
  Planned again = begin(index, 1, 16);
  CHECK(again.onloads.empty());
  CHECK_EQ(again.batch.rows[0].cached, 0);
  index.abort(again.batch, false);
  Tasks onloads;
  const int64_t user = 1;
  index.prefetch(std::span(&user, 1), 1, onloads);
  CHECK(onloads.empty());
  done(index, task);
  CHECK_EQ(begin(index, 1, 16).onloads.size(), size_t{1});
}

void a_commit_behind_an_onload_is_offloaded_when_that_is_done() {
  for (const bool ok : {true, false}) {
    Index index(config(12, 4));
    done(index, gathered(index, store(index, 1, 16)));
    take_every_page(index, 12);
    Planned back = begin(index, 1, 33);
    CHECK(back.batch.rows[0].cached == 16 && back.batch.rows[0].stores && back.onloads.size() == 1);
    Tasks offloads, next;
    index.commit(back.batch, offloads);
    CHECK(offloads.empty());  // its first pages are still being written
    index.onload_done(back.onloads[0], ok, next);
    CHECK_EQ(next.size(), size_t{ok});
    if (ok) {
      CHECK(next[0].first == 16 && next[0].end == 32);
      done(index, gathered(index, next));
      CHECK_EQ(index.lengths(1, 1).host, 32);
    }
    CHECK(index.check().empty());
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"content that was edited meanwhile is not published", content_that_was_edited_meanwhile_is_not_published},
                    {"its host blocks are no victims", its_host_blocks_are_no_victims},
                    {"its old tail is not read while it is replaced", its_old_tail_is_not_read_while_it_is_replaced},
                    {"a commit behind an onload is offloaded when that is done", a_commit_behind_an_onload_is_offloaded_when_that_is_done}});
}
