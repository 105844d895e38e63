// Host to device (paper 4.2), layer-major across a batch, so that layer 0 of every user is there before layer 1 of any.
//
//   direct: host blocks straight into the users' pages.
//   staged: host blocks -> two staging buffers in turn -> onload region, contiguous -> scatter into the users' pages.
//
// The task says which: it names its span of the region, or none. Without pages it ends in the region.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "transfer/load.h"
#include "transfer/slices.h"
#include "transfer/staging.h"

namespace mtserve {

enum class Strategy { direct, staged };

class OnloadPipeline {
 public:
  // `region_is_read`: by batches, whose uses the next copies into it have to await.
  OnloadPipeline(Runtime& runtime, const Places& places, Strategy strategy, bool region_is_read);

  struct Group {
    std::vector<TransferTask> tasks;
    std::vector<LoadPtr> loads;   // one per task
    std::vector<EventPtr> uses;   // pages, the region's too, may be written once these have passed
  };
  // Returns at once; `done` runs on a host thread when everything has arrived or failed.
  void start(Group group, std::function<void(const Group&)> done);

 private:
  void issue(const Group& group);
  void issue_direct(const TransferTask& task, const LoadPtr& load, int32_t layer);
  void issue_staged(const TransferTask& task, const LoadPtr& load, int32_t layer);
  void scatter(const TransferTask& task, const LoadPtr& load, int32_t layer, const std::vector<Slice>& parts);
  CopyOrder order(const char* name, int32_t layer, Route route, const LoadPtr& load, std::vector<Piece> pieces,
                  FaultCounter fault = nullptr) const;

  Runtime& runtime_;
  const Places places_;
  const bool region_is_read_;
  std::array<StagingBuffer, 2> staging_;
  size_t staged_slices_ = 0;
  // Host threads last: they are joined first, while what they use still stands.
  std::unique_ptr<Stream> onload_, scatter_, finisher_, issuer_;
};

}  // namespace mtserve
