// Compiled for AVX-512 (F, BW, DQ, VL, BF16), FMA and F16C.
#include <immintrin.h>

#define MTSERVE_ISA "avx512_bf16"
#define MTSERVE_LANES 16
#define MTSERVE_TILE_ROWS 14
#define MTSERVE_BF16_PAIRS
#define MTSERVE_KERNEL kAttentionAvx512Bf16
#include "kernels/attention_kernel.inc"
