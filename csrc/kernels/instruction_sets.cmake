# Compiler options of the kernels. Where products and sums fuse is spelled out in the source: the order of rounding is
# part of the result.
set(MTSERVE_KERNEL_OPTIONS -O3 -ffp-contract=off)
set(MTSERVE_AVX2 ${MTSERVE_KERNEL_OPTIONS} -mavx2 -mfma -mf16c)
set(MTSERVE_AVX512 ${MTSERVE_AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
set(MTSERVE_AVX512_BF16 ${MTSERVE_AVX512} -mavx512bf16)
set(MTSERVE_AMX ${MTSERVE_AVX512} -mamx-tile -mamx-bf16)

# The assembler has to know them, too.
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_FLAGS "-mamx-tile -mamx-bf16")
check_cxx_source_compiles("#include <immintrin.h>
int main() { _tile_zero(0); _tile_dpbf16ps(0, 1, 2); }" MTSERVE_COMPILER_KNOWS_AMX)
unset(CMAKE_REQUIRED_FLAGS)
