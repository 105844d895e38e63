// Host to device (paper 4.2), layer-major across a batch, so that layer 0 of every user is there before layer 1 of any.
//
//   direct: host blocks straight into the users' pages.
//   staged: host blocks -> two staging buffers in turn -> onload region, contiguous -> scatter into the users' pages.
#pragma once

#include <array>
#include <deque>
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
  // `region_pages` pages behind the table's last user page are the onload region; staged needs some.
  OnloadPipeline(Runtime& runtime, const Places& places, Strategy strategy, int32_t region_first, int32_t region_pages);

  struct Group {
    std::vector<TransferTask> tasks;
    std::vector<LoadPtr> loads;   // one per task
    std::vector<EventPtr> uses;   // pages may be written once these have passed
  };
  // Returns at once; `done` runs on a host thread when everything has arrived or failed.
  void start(Group group, std::function<void(const Group&)> done);

 private:
  struct Occupant {
    int32_t first, pages;
    LoadPtr load;
  };

  void issue(const Group& group);
  void issue_direct(const TransferTask& task, const LoadPtr& load, int32_t layer);
  void issue_staged(const TransferTask& task, const LoadPtr& load, int32_t layer, int32_t region_page);
  int32_t take_region(const TransferTask& task, const LoadPtr& load, const Group& group);

  Runtime& runtime_;
  const Places places_;
  const Strategy strategy_;
  const int32_t region_first_, region_pages_;
  int32_t region_next_ = 0;
  std::deque<Occupant> occupants_;
  std::array<StagingBuffer, 2> staging_;
  size_t staged_slices_ = 0;
  // Host threads last: they are joined first, while what they use still stands.
  std::unique_ptr<Stream> onload_, scatter_, finisher_, issuer_;
};

}  // namespace mtserve
