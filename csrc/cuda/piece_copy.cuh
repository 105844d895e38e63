// Copies of many runs of bytes by one kernel: scatters and gathers on the device, and reads of pinned host memory. No
// torch and no CUDA headers here, so that g++ can compile and run it too.
//
// The runs travel in the kernel's arguments: nothing has to be uploaded first, and nothing outlives the launch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mtserve::cuda {

struct Run {
  unsigned char* to;
  const unsigned char* from;
  int64_t bytes;
};

// 3 KiB of the 4 KiB that arguments may take.
constexpr int kRuns = 128;
struct Runs {
  Run run[kRuns];
};

// One run per blockIdx.y, cut over blockIdx.x. Units of 16 bytes where both ends allow, else single bytes.
template <class Wide>
__global__ void copy_runs(Runs runs) {
  const Run run = runs.run[blockIdx.y];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const bool wide = ((reinterpret_cast<uintptr_t>(run.to) | reinterpret_cast<uintptr_t>(run.from)) & (sizeof(Wide) - 1)) == 0;
  const int64_t units = wide ? run.bytes / static_cast<int64_t>(sizeof(Wide)) : 0;
  Wide* to = reinterpret_cast<Wide*>(run.to);
  const Wide* from = reinterpret_cast<const Wide*>(run.from);
  for (int64_t i = first; i < units; i += stride) to[i] = from[i];
  for (int64_t i = units * static_cast<int64_t>(sizeof(Wide)) + first; i < run.bytes; i += stride) run.to[i] = run.from[i];
}

}  // namespace mtserve::cuda
