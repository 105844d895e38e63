#!/usr/bin/env bash
# On a machine with a CUDA device: builds for it, runs the GPU tests, measures, and leaves the figures in a JSON file.
#
#   bash benchmarks/gpu_check.sh [FILE]        default: benchmarks/results/<card>-<date>.json
#
# Needs torch with CUDA and nvcc; neither torchrec nor fbgemm. Build tools that are missing are taken from MTSERVE_WHEELS,
# a folder of wheels (nanobind, scikit-build-core, cmake, ninja, numpy, rich, typer, pytest), or else from pip's index.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

"$python" - <<'PY' || exit 1
import sys
try:
    import torch
except ImportError:
    sys.exit("torch is not installed for this Python; set PYTHON to one that has it")
if not torch.cuda.is_available():
    sys.exit("torch sees no CUDA device: nothing to check. mtserve doctor says why")
print("device:", torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)
PY
command -v nvcc >/dev/null || { echo "no nvcc: put the CUDA toolkit's bin folder on PATH" >&2; exit 1; }

started=$SECONDS
step() { echo "== $* ($((SECONDS - started)) s)"; }

step "build tools"
missing=()
for pair in nanobind:nanobind scikit_build_core:scikit-build-core cmake:cmake ninja:ninja numpy:numpy rich:rich typer:typer pytest:pytest; do
  "$python" -c "import ${pair%%:*}" 2>/dev/null || missing+=("${pair##*:}")
done
if ((${#missing[@]})); then
  "$python" -m pip install --quiet ${MTSERVE_WHEELS:+--no-index --find-links "$MTSERVE_WHEELS"} "${missing[@]}"
fi

step "build"
architecture=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m pip install --quiet --no-build-isolation --no-deps --target "$site" . \
  -C cmake.define.MTSERVE_CUDA=ON -C "cmake.define.CMAKE_CUDA_ARCHITECTURES=$architecture"
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"

step "tests/gpu"
# Beside the package that was just built: the repository's own folder of that name has no libraries in it.
cp -r tests benchmarks "$site/"
(cd "$site" && "$python" -m pytest -q -p no:cacheprovider --import-mode=importlib -c /dev/null --rootdir "$site" tests/gpu) || failed=1

step "figures"
card=$("$python" -c 'import re, torch; print(re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-"))')
file=${1:-benchmarks/results/$card-$(date +%F).json}
mkdir -p "$(dirname "$file")"
"$python" benchmarks/gpu_check.py --json "$file"
step "done: figures in $file"
exit "${failed:-0}"
