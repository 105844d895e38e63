// Writes what a batch was granted in the form that models and kernels read.
#pragma once

#include <cstdint>
#include <vector>

#include "index/types.h"

namespace mtserve {

// Six rows of B + 1 int64: cached history tokens, context rows to compute, delta tokens, tokens in pages, candidates,
// and the offsets of each row's dense tokens.
void write_layout(const Batch& batch, const std::vector<int64_t>& candidates, int64_t* out);

// Page ids, int32: B + 1 offsets, B last-page lengths, then the ids row after row. With the delta the table covers all
// of a row's tokens; table_size is then -1 when a row has no pages for them.
int64_t table_size(const Batch& batch, int32_t page_size, bool include_delta);
void write_table(const Batch& batch, int32_t page_size, bool include_delta, int32_t* out);

// For each dense row of the batch, where its keys and values are stored: page * page_size + row, or -1.
void write_slots(const Batch& batch, const std::vector<int64_t>& candidates, int32_t page_size, int64_t* out);

}  // namespace mtserve
