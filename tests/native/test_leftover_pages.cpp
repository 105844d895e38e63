// A writer that aborts while another batch reads its user leaves its pages with the user. Whoever fills them next, by
// an onload or by appending, has to wait for what the writer launched (ownership rule 1, scenario C2).
#include <span>
#include <vector>

#include "check.h"
#include "index/index.h"

using namespace mtserve;

namespace {

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

// User 1 has 16 tokens on the way to the host and no page; a writer and a reader of it are open.
struct Scene {
  Index index{{.page_size = 4, .num_pages = 5, .chunk_tokens = 16, .slot_tokens = 4, .num_chunks = 4}};
  TransferTask offload;
  Planned writer, reader;

  Scene() {
    Planned first = begin(index, 1, 16);
    std::vector<TransferTask> offloads;
    index.commit(first.batch, offloads);
    CHECK_EQ(offloads.size(), size_t{1});
    offload = offloads[0];
    index.offload_gathered(offload);
    Planned everything = begin(index, 2, 20);
    CHECK(everything.batch.rows[0].stores);
    index.abort(everything.batch, false);
    writer = begin(index, 1, 18);
    CHECK_EQ(writer.batch.rows[0].cached, 0);
    CHECK(writer.batch.rows[0].stores);
    reader = begin(index, 1, 18);
    CHECK(!reader.batch.rows[0].stores);
  }
};

void an_onload_waits_for_the_aborted_writer() {
  Scene scene;
  std::vector<TransferTask> next;
  scene.index.offload_done(scene.offload, true, next);
  const Fence gone = scene.index.abort(scene.writer.batch, false);
  Planned again = begin(scene.index, 1, 18);
  CHECK_EQ(again.batch.rows[0].cached, 16);
  CHECK_EQ(again.onloads.size(), size_t{1});
  CHECK(again.onloads[0].pages[0] == scene.writer.batch.pages[0]);
  CHECK(again.onloads[0].after >= gone);
}

void the_next_writer_waits_for_the_aborted_one() {
  Scene scene;
  std::vector<TransferTask> next;
  scene.index.offload_done(scene.offload, false, next);
  const Fence gone = scene.index.abort(scene.writer.batch, false);
  Planned again = begin(scene.index, 1, 18);
  CHECK_EQ(again.batch.rows[0].cached, 0);
  CHECK(again.batch.rows[0].stores);
  CHECK(again.batch.pages[0] == scene.writer.batch.pages[0]);
  CHECK(again.batch.after >= gone);
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"an onload waits for the aborted writer", an_onload_waits_for_the_aborted_writer},
                    {"the next writer waits for the aborted one", the_next_writer_waits_for_the_aborted_one}});
}
