#include "transfer/offload.h"

#include "runtime/faults.h"

namespace mtserve {

OffloadPipeline::OffloadPipeline(Runtime& runtime, const Places& places, Strategy strategy)
    : runtime_(runtime), places_(places), strategy_(strategy),
      offload_(strategy == Strategy::staged ? runtime.make_stream("offload") : runtime.make_copy_stream("offload")) {
  if (strategy == Strategy::staged)
    for (size_t i = 0; i < staging_.size(); ++i) {
      staging_[i] = make_staging(runtime, places.slice_bytes());
      workers_[i] = runtime.make_host_thread("offload worker " + std::to_string(i));
    }
  finisher_ = runtime.make_host_thread("offload done");
  issuer_ = runtime.make_host_thread("offload issue");
  for (Stream* stream : {offload_.get(), workers_[0].get(), workers_[1].get(), finisher_.get(), issuer_.get()})
    if (stream != nullptr) stream->stay_in_background();
  issuer_->stay_in_background(true);
}

void OffloadPipeline::start(TransferTask task, std::vector<EventPtr> uses, std::function<void(const TransferTask&)> gathered,
                            std::function<void(const TransferTask&, bool)> done) {
  auto job = std::make_shared<Job>();
  job->task = std::move(task);
  job->uses = std::move(uses);
  job->gathered = std::move(gathered);
  job->done = std::move(done);
  issuer_->launch(
      "issue offload",
      [this, job] {
        for (const EventPtr& use : job->uses) offload_->wait(use);
        try {
          // A first block that goes on in the middle of its chunk is written in place.
          const size_t fresh = job->task.first % places_.chunk_tokens != 0;
          for (size_t i = fresh; i < job->task.blocks.size(); ++i) places_.tier->reserve(job->task.blocks[i]);
        } catch (...) {
          job->failed = true;
        }
        strategy_ == Strategy::staged ? issue_staged(job) : issue_direct(job);
        finisher_->launch("offload done", [job] { job->done(job->task, !job->failed); }, nullptr);
      },
      nullptr);
}

void OffloadPipeline::issue_direct(const JobPtr& job) {
  for (int32_t layer = 0; layer < places_.geometry.num_layers; ++layer) {
    if (places_.tier_is_memory()) {
      offload_->copy(order("offload copy", layer, Route::to_host, job, tier_pieces(places_, job->task, layer, false), &Faults::offload_copy));
      continue;
    }
    auto parts = std::make_shared<const std::vector<Slice>>(slices(places_, job->task, layer));
    offload_->launch(
        "offload copy",
        [this, job, parts, layer] {
          if (job->failed) return;
          try {
            strike(runtime_.faults, runtime_.faults.offload_copy);
            for (const Slice& slice : *parts) places_.tier->write(slice.block, layer, slice.rows);
          } catch (...) {
            job->failed = true;
          }
        },
        [&] { return slice_accesses(places_, *parts, layer, false); });
  }
  EventPtr written = runtime_.make_event();
  offload_->record(written);
  finisher_->wait(written);
}

void OffloadPipeline::issue_staged(const JobPtr& job) {
  const Geometry& g = places_.geometry;
  try {
    job->transient = runtime_.allocate_on_device(static_cast<int64_t>(job->task.pages.size()) * g.num_layers * g.page_bytes(), *offload_);
  } catch (...) {
    job->failed = true;
    return;
  }
  for (int32_t layer = 0; layer < g.num_layers; ++layer) gather(job, layer);
  EventPtr gathered = runtime_.make_event();
  offload_->record(gathered);
  finisher_->wait(gathered);
  finisher_->launch(
      "gathered",
      [job] {
        if (!job->failed) job->gathered(job->task);  // pages that were not read are not given up
      },
      nullptr);
  for (int32_t layer = 0; layer < g.num_layers; ++layer)
    for (const Slice& slice : slices(places_, job->task, layer)) drain_slice(job, slice, layer);
  for (const StagingBuffer& buffer : staging_)
    if (buffer.free != nullptr) finisher_->wait(buffer.free);
}

std::byte* OffloadPipeline::transient_page(const Job& job, int32_t layer, int32_t page) const {
  const int64_t pages = static_cast<int64_t>(job.task.pages.size());
  return job.transient.get() + (layer * pages + page) * places_.geometry.page_bytes();
}

void OffloadPipeline::gather(const JobPtr& job, int32_t layer) {
  std::vector<Piece> pieces;
  for (const Slice& slice : slices(places_, job->task, layer))
    for (size_t i = 0; i < slice.rows.size(); ++i) {
      const PageRows& r = slice.rows[i];
      std::byte* to = transient_page(*job, layer, slice.first_page + static_cast<int32_t>(i));
      add_pieces(pieces, places_.geometry, to, r.page, r.first, r.end);
    }
  offload_->copy(order("gather", layer, Route::on_device, job, std::move(pieces)));
}

CopyOrder OffloadPipeline::order(const char* name, int32_t layer, Route route, const JobPtr& job, std::vector<Piece> pieces,
                                 FaultCounter fault) const {
  return {name, route, std::move(pieces), &job->failed, job, &runtime_.faults, fault, layer};
}

void OffloadPipeline::drain_slice(const JobPtr& job, const Slice& slice, int32_t layer) {
  const Geometry& g = places_.geometry;
  const size_t turn = staged_slices_++ % staging_.size();
  StagingBuffer& buffer = staging_[turn];
  // The buffer is refilled only when its worker has written what it held.
  if (buffer.free != nullptr) runtime_.synchronize(buffer.free);
  const int64_t bytes = static_cast<int64_t>(slice.rows.size()) * g.page_bytes();
  const std::byte* from = transient_page(*job, layer, slice.first_page);
  std::byte* to = buffer.bytes.get();
  offload_->copy(order("offload copy", layer, Route::to_host, job, {{to, from, bytes}}, &Faults::offload_copy));
  EventPtr landed = runtime_.make_event();
  offload_->record(landed);

  std::vector<PageRows> staged = slice.rows;
  for (size_t i = 0; i < staged.size(); ++i) staged[i].page = to + i * g.page_bytes();
  workers_[turn]->wait(landed);
  workers_[turn]->launch(
      "write host block",
      [this, job, block = slice.block, layer, staged] {
        if (job->failed) return;
        try {
          places_.tier->write(block, layer, staged);
        } catch (...) {
          job->failed = true;
        }
      },
      [&] {
        Accesses out{{to, bytes, false}};
        for (const PageRows& r : staged) add_rows(out, g, places_.tier->address(slice.block, layer, r.page_in_block), r.first, r.end, true);
        return out;
      });
  buffer.free = runtime_.make_event();
  workers_[turn]->record(buffer.free);
}

}  // namespace mtserve
