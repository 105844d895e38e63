#!/usr/bin/env bash
# Builds the native tests under each sanitizer and runs them.
set -euo pipefail
cd "$(dirname "$0")/../.."
sources=(csrc/index/*.cpp csrc/engine/*.cpp csrc/transfer/*.cpp csrc/runtime/*.cpp csrc/tiers/*.cpp)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

for sanitizer in thread address,undefined; do
  for test in tests/native/*.cpp; do
    binary=$build/$(basename "$test" .cpp)-$sanitizer
    "${CXX:-g++}" -std=c++20 -O1 -g -pthread -fsanitize="$sanitizer" -fno-sanitize-recover=all -Icsrc "$test" "${sources[@]}" -o "$binary"
    echo "$sanitizer: $(basename "$test")"
    TSAN_OPTIONS=halt_on_error=1 "$binary" --quick
  done
done
