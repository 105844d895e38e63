// Chain hash over a history's tokens, one value per page: the first page that differs is where reuse ends.
#pragma once

#include <cstdint>

#include "index/types.h"

namespace mtserve {

// Folds one token into a running value. A polynomial over mixed tokens: order matters, and it is the same in every
// process.
inline uint64_t fold_token(uint64_t chain, uint64_t token) {
  token = (token ^ (token >> 32)) * 0x9e3779b97f4a7c15ull;
  return chain * 0xd6e8feb86659fd93ull + (token ^ (token >> 29)) + 0x632be59bd9b4e019ull;
}

// The chain over tokens [first, end) of a row; positions below `context` are context rows, which have no hash of
// their own (their values are part of the entry's identity).
inline uint64_t fold_range(uint64_t chain, const uint64_t* history_hashes, int32_t context, int32_t first, int32_t end) {
  for (int32_t t = first < context ? context : first; t < end; ++t) chain = fold_token(chain, history_hashes[t - context]);
  return chain;
}

inline PageHashes hash_row(const uint64_t* history_hashes, int32_t context, int32_t tokens, int32_t page_size) {
  PageHashes hashes;
  hashes.tokens = tokens;
  hashes.chain.resize(tokens / page_size);
  uint64_t chain = 0;
  for (int32_t page = 0; page < tokens / page_size; ++page) {
    chain = fold_range(chain, history_hashes, context, page * page_size, (page + 1) * page_size);
    hashes.chain[page] = chain;
  }
  hashes.tail = fold_range(chain, history_hashes, context, tokens / page_size * page_size, tokens);
  return hashes;
}

}  // namespace mtserve
