// Compiled for any processor of the platform.

#define MTSERVE_ISA "baseline"
#define MTSERVE_LANES 4
#define MTSERVE_TILE_ROWS 4
#define MTSERVE_KERNEL kAttentionBaseline
#include "kernels/attention_kernel.inc"
