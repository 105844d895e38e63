// Device to host (paper 4.2, step 6), in the background.
//
//   direct: pages straight into host blocks.
//   staged: gather into a transient buffer -> two staging buffers in turn -> a worker per buffer writes host blocks.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "transfer/onload.h"

namespace mtserve {

class OffloadPipeline {
 public:
  OffloadPipeline(Runtime& runtime, const Places& places, Strategy strategy);

  // Returns at once. The pages are read after `uses` have passed. On host threads: `gathered` when the pages have been
  // read for good (staged only), `done` with the outcome.
  void start(TransferTask task, std::vector<EventPtr> uses, std::function<void(const TransferTask&)> gathered,
             std::function<void(const TransferTask&, bool)> done);

 private:
  struct Job {
    TransferTask task;
    std::vector<EventPtr> uses;
    std::function<void(const TransferTask&)> gathered;
    std::function<void(const TransferTask&, bool)> done;
    std::atomic<bool> failed{false};
    std::shared_ptr<std::byte> transient;  // staged, on the device: [layer][page]
  };
  using JobPtr = std::shared_ptr<Job>;

  void issue_direct(const JobPtr& job);
  void issue_staged(const JobPtr& job);
  void gather(const JobPtr& job, int32_t layer);
  void drain_slice(const JobPtr& job, const Slice& slice, int32_t layer);
  CopyOrder order(const char* name, int32_t layer, Route route, const JobPtr& job, std::vector<Piece> pieces,
                  FaultCounter fault = nullptr) const;
  std::byte* transient_page(const Job& job, int32_t layer, int32_t page) const;

  Runtime& runtime_;
  const Places places_;
  const Strategy strategy_;
  std::array<StagingBuffer, 2> staging_;
  size_t staged_slices_ = 0;
  std::unique_ptr<Stream> offload_;
  std::array<std::unique_ptr<Stream>, 2> workers_;  // one per staging buffer
  std::unique_ptr<Stream> finisher_, issuer_;
};

}  // namespace mtserve
