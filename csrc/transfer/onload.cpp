#include "transfer/onload.h"

#include <cstring>

#include "tiers/page_copy.h"
#include "transfer/faults.h"

namespace mtserve {

OnloadPipeline::OnloadPipeline(Runtime& runtime, const Places& places, Strategy strategy, int32_t region_first,
                               int32_t region_pages)
    : runtime_(runtime),
      places_(places),
      strategy_(strategy),
      region_first_(region_first),
      region_pages_(region_pages),
      onload_(runtime.make_stream("onload")),
      scatter_(strategy == Strategy::staged ? runtime.make_stream("scatter") : nullptr),
      finisher_(runtime.make_host_thread("onload done")),
      issuer_(runtime.make_host_thread("onload issue")) {
  if (strategy == Strategy::staged)
    for (StagingBuffer& buffer : staging_) buffer = make_staging(places.slice_bytes());
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
  for (const EventPtr& use : group.uses) (strategy_ == Strategy::staged ? scatter_ : onload_)->wait(use);
  std::vector<int32_t> region(group.tasks.size(), -1);
  if (strategy_ == Strategy::staged) {
    bool direct = false;
    for (size_t i = 0; i < group.tasks.size(); ++i) {
      region[i] = take_region(group.tasks[i], group.loads[i], group);
      direct |= region[i] < 0;
    }
    if (direct)
      for (const EventPtr& use : group.uses) onload_->wait(use);
  }
  for (int32_t layer = 0; layer < places_.geometry.num_layers; ++layer)
    for (size_t i = 0; i < group.tasks.size(); ++i) {
      const LoadPtr& load = group.loads[i];
      if (region[i] < 0)
        issue_direct(group.tasks[i], load, layer);
      else
        issue_staged(group.tasks[i], load, layer, region[i]);
      load->issued[layer]->set();
    }
}

void OnloadPipeline::issue_direct(const TransferTask& task, const LoadPtr& load, int32_t layer) {
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
  onload_->record(load->ready[layer]);
}

// A span of the region for the task, or -1 when it does not fit beside the rest of its group.
int32_t OnloadPipeline::take_region(const TransferTask& task, const LoadPtr& load, const Group& group) {
  const int32_t pages = static_cast<int32_t>(task.pages.size());
  if (pages > region_pages_) return -1;
  const int32_t first = region_next_ + pages <= region_pages_ ? region_next_ : 0;
  const auto overlaps = [&](const Occupant& o) { return o.first < first + pages && first < o.first + o.pages; };
  for (const Occupant& o : occupants_)
    if (overlaps(o) && std::find(group.loads.begin(), group.loads.end(), o.load) != group.loads.end()) return -1;
  // Layer by layer, the copy waits until the earlier onload of this span has been scattered.
  for (auto o = occupants_.begin(); o != occupants_.end();) {
    if (!overlaps(*o)) {
      ++o;
      continue;
    }
    for (const EventPtr& scattered : o->load->ready) onload_->wait(scattered);
    o = occupants_.erase(o);
  }
  occupants_.push_back({first, pages, load});
  region_next_ = first + pages;
  return first;
}

void OnloadPipeline::issue_staged(const TransferTask& task, const LoadPtr& load, int32_t layer, int32_t region_page) {
  auto parts = std::make_shared<const std::vector<Slice>>(slices(places_, task, layer));
  const Geometry& g = places_.geometry;
  const auto region = [&](int32_t page) { return places_.table.page(layer, region_first_ + region_page + page); };
  for (const Slice& slice : *parts) {
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
    std::byte* to = region(slice.first_page);
    onload_->launch(
        "onload copy",
        [this, load, to, from = buffer.bytes.get(), bytes] {
          try {
            strike(runtime_.faults, runtime_.faults.onload_copy);
            std::memcpy(to, from, static_cast<size_t>(bytes));
          } catch (...) {
            load->failed = true;
          }
        },
        [&] { return Accesses{{buffer.bytes.get(), bytes, false}, {to, bytes, true}}; });
    buffer.free = runtime_.make_event();
    onload_->record(buffer.free);
  }
  EventPtr landed = runtime_.make_event();
  onload_->record(landed);
  scatter_->wait(landed);
  scatter_->launch(
      "scatter",
      [this, parts, load, layer, region_page] {
        if (load->failed) return;
        for (const Slice& slice : *parts)
          for (size_t i = 0; i < slice.rows.size(); ++i) {
            const PageRows& r = slice.rows[i];
            const PageId from = region_first_ + region_page + slice.first_page + static_cast<PageId>(i);
            copy_rows(places_.geometry, r.page, places_.table.page(layer, from), r.first, r.end);
          }
      },
      [&] {
        Accesses out;
        for (const Slice& slice : *parts)
          for (size_t i = 0; i < slice.rows.size(); ++i) {
            const PageRows& r = slice.rows[i];
            add_rows(out, g, r.page, r.first, r.end, true);
            add_rows(out, g, region(slice.first_page + static_cast<int32_t>(i)), r.first, r.end, false);
          }
        return out;
      });
  scatter_->record(load->ready[layer]);
}

}  // namespace mtserve
