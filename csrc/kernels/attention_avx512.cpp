// Compiled for AVX-512 (F, BW, DQ, VL), FMA and F16C.
#include <immintrin.h>

#define MTSERVE_ISA "avx512"
#define MTSERVE_LANES 16
#define MTSERVE_TILE_ROWS 14
#define MTSERVE_KERNEL kAttentionAvx512
#include "kernels/attention_kernel.inc"
