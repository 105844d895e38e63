#!/usr/bin/env bash
# Builds the native tests under each sanitizer and runs them, the ordering tests on fewer schedules. Needs cmake and ninja.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

for sanitizer in thread address,undefined; do
  cmake -S tests/native -B "$build/$sanitizer" -G Ninja -DMTSERVE_SANITIZE="$sanitizer" >"$build/log"
  cmake --build "$build/$sanitizer" --target mtserve_native_tests >"$build/log" || { cat "$build/log" >&2; exit 1; }
  for test in tests/native/*.cpp; do
    name=$(basename "$test" .cpp)
    echo "$sanitizer: $name"
    TSAN_OPTIONS=halt_on_error=1 "$build/$sanitizer/$name" --quick
  done
done
