// Compiled for AVX2, FMA and F16C.
#include <immintrin.h>

#define MTSERVE_ISA "avx2"
#define MTSERVE_LANES 8
#define MTSERVE_TILE_ROWS 6
#define MTSERVE_KERNEL kAttentionAvx2
#include "kernels/attention_kernel.inc"
