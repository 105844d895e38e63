// Whether two builds of the attention kernel compute the same.
#pragma once

#include "kernels/attention_kernel.h"

namespace mtserve::kernels {

// Runs both on a small bfloat16 problem with pages, new keys and candidates: true if their results are equal but for
// the order of sums. Takes well below a millisecond.
bool kernels_agree(const AttentionKernel& kernel, const AttentionKernel& trusted);

}  // namespace mtserve::kernels
