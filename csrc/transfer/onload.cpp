#include "transfer/onload.h"

#include <algorithm>

#include "runtime/faults.h"

namespace mtserve {

OnloadPipeline::OnloadPipeline(Runtime& runtime, const Places& places, Strategy strategy, bool region_is_read)
    : runtime_(runtime),
      places_(places),
      region_is_read_(region_is_read),
      onload_(strategy == Strategy::staged ? runtime.make_stream("onload") : runtime.make_copy_stream("onload")),
      scatter_(strategy == Strategy::staged ? runtime.make_stream("scatter") : nullptr),
      finisher_(runtime.make_host_thread("onload done")),
      issuer_(runtime.make_host_thread("onload issue")) {
  if (strategy == Strategy::staged)
    for (StagingBuffer& buffer : staging_) buffer = make_staging(runtime, places.slice_bytes());
}

void OnloadPipeline::start(Group group, std::function<void(const Group&)> done) {
  auto shared = std::make_shared<const Group>(std::move(group));
  issuer_->launch(
      "issue onload",
      [this, shared, done = std::move(done)] {
        issue(*shared);
        for (const LoadPtr& load : shared->loads) finisher_->wait(load->ready.back());
        finisher_->launch("onload done", [shared, done] { done(*shared); }, nullptr);
      },
      nullptr);
}

void OnloadPipeline::issue(const Group& group) {
  const bool copies_overwrite =
      region_is_read_ || std::any_of(group.tasks.begin(), group.tasks.end(), [](const TransferTask& task) { return task.region < 0; });
  for (const EventPtr& use : group.uses) {
    if (copies_overwrite) onload_->wait(use);
    if (scatter_ != nullptr) scatter_->wait(use);
  }
  for (int32_t layer = 0; layer < places_.geometry.num_layers; ++layer)
    for (size_t i = 0; i < group.tasks.size(); ++i) {
      const LoadPtr& load = group.loads[i];
      if (group.tasks[i].region < 0)
        issue_direct(group.tasks[i], load, layer);
      else
        issue_staged(group.tasks[i], load, layer);
      load->issued[layer]->set();
    }
}

void OnloadPipeline::issue_direct(const TransferTask& task, const LoadPtr& load, int32_t layer) {
  if (places_.tier_is_memory()) {
    onload_->copy(order("onload copy", layer, Route::to_device, load, tier_pieces(places_, task, layer, true), &Faults::onload_copy));
  } else {
    auto parts = std::make_shared<const std::vector<Slice>>(slices(places_, task, layer));
    onload_->launch(
        "onload copy",
        [this, parts, load, layer] {
          if (load->failed) return;
          try {
            strike(runtime_.faults, runtime_.faults.onload_copy);
            for (const Slice& slice : *parts) places_.tier->read(slice.block, layer, slice.rows);
          } catch (...) {
            load->failed = true;
          }
        },
        [&] { return slice_accesses(places_, *parts, layer, true); });
  }
  onload_->record(load->ready[layer]);
}

CopyOrder OnloadPipeline::order(const char* name, int32_t layer, Route route, const LoadPtr& load, std::vector<Piece> pieces,
                                FaultCounter fault) const {
  return {name, route, std::move(pieces), &load->failed, load, &runtime_.faults, fault, layer};
}

void OnloadPipeline::issue_staged(const TransferTask& task, const LoadPtr& load, int32_t layer) {
  const std::vector<Slice> parts = slices(places_, task, layer);
  const Geometry& g = places_.geometry;
  for (const Slice& slice : parts) {
    // Host-side preparation of one buffer overlaps the copy engine's work on the other.
    StagingBuffer& buffer = staging_[staged_slices_++ % staging_.size()];
    if (buffer.free != nullptr) runtime_.synchronize(buffer.free);
    const int64_t bytes = static_cast<int64_t>(slice.rows.size()) * g.page_bytes();
    std::vector<PageRows> staged = slice.rows;
    for (size_t i = 0; i < staged.size(); ++i) staged[i].page = buffer.bytes.get() + i * g.page_bytes();
    runtime_.touch("fill staging buffer", [&] {
      Accesses out{{buffer.bytes.get(), bytes, true}};
      for (const PageRows& r : staged) add_rows(out, g, places_.tier->address(slice.block, layer, r.page_in_block), r.first, r.end, false);
      return out;
    });
    try {
      if (!load->failed) places_.tier->read(slice.block, layer, staged);
    } catch (...) {
      load->failed = true;
    }
    std::byte* to = places_.table.page(layer, task.region + slice.first_page);
    onload_->copy(order("onload copy", layer, Route::to_device, load, {{to, buffer.bytes.get(), bytes}}, &Faults::onload_copy));
    buffer.free = runtime_.make_event();
    onload_->record(buffer.free);
  }
  onload_->record(load->landed[layer]);
  if (!task.pages.empty()) scatter(task, load, layer, parts);
}

// From the region into the user's pages.
void OnloadPipeline::scatter(const TransferTask& task, const LoadPtr& load, int32_t layer, const std::vector<Slice>& parts) {
  std::vector<Piece> pieces;
  for (const Slice& slice : parts)
    for (size_t i = 0; i < slice.rows.size(); ++i) {
      const PageRows& r = slice.rows[i];
      const PageId from = task.region + slice.first_page + static_cast<PageId>(i);
      add_pieces(pieces, places_.geometry, r.page, places_.table.page(layer, from), r.first, r.end);
    }
  scatter_->wait(load->landed[layer]);
  scatter_->copy(order("scatter", layer, Route::on_device, load, std::move(pieces)));
  scatter_->record(load->ready[layer]);
}

}  // namespace mtserve
