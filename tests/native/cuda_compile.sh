#!/usr/bin/env bash
# Compiles the CUDA kernels for the architectures we serve; fails on register spills. Without nvcc it fails, unless
# MTSERVE_NO_NVCC=1 says that this is known.
set -euo pipefail
cd "$(dirname "$0")/../.."
if ! command -v nvcc >/dev/null; then
  [[ "${MTSERVE_NO_NVCC:-}" == 1 ]] && { echo "no nvcc: the CUDA kernels were not compiled"; exit 0; }
  echo "no nvcc: install the CUDA toolkit, or set MTSERVE_NO_NVCC=1 to go on without compiling the CUDA kernels" >&2
  exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
nvcc -std=c++17 -Xptxas -v -Icsrc -c csrc/cuda/launch.cu -o /dev/null \
  -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 -gencode arch=compute_100,code=sm_100 2>"$log" \
  || { cat "$log" >&2; exit 1; }
if grep 'bytes spill' "$log" | grep -vq '0 bytes spill stores, 0 bytes spill loads'; then
  grep -B1 'bytes spill' "$log" >&2
  exit 1
fi
echo "CUDA kernels compiled for sm_80, sm_90, sm_100: no spills"
