#!/usr/bin/env bash
# Builds, tests and benchmarks on a GPU machine in one call: gpu_check.sh [build] [test] [bench]; none named: all three.
# PYTHON names the interpreter (one that has torch); OUT, a folder, receives the logs, the figures and the kernel
# objects, which another machine with the same nvcc and the same FLASH_ATTN_EXT_ARCHS can use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
out=${OUT:-build/gpu_check}
mkdir -p "$out"
parts=("$@")
[ $# -gt 0 ] || parts=(build test bench)
for part in "${parts[@]}"; do
  case "$part" in
    build)
      "$python" -m build_support
      tar cf "$out/kernels.tar" build/kernels
      ;;
    test) "$python" -m pytest tests -q -p no:cacheprovider 2>&1 | tee "$out/test.log" ;;
    bench) "$python" -m flash_attn_ext bench --device cuda --output "$out" 2>&1 | tee "$out/bench.log" ;;
    *)
      echo "gpu_check.sh: unknown part '$part'; allowed: build, test, bench" >&2
      exit 2
      ;;
  esac
done
