#!/usr/bin/env bash
# Everything that needs a GPU machine, in one call: gpu_check.sh [PART...], in the order given; none named: all but
# demo-large.
#
#   build      compiles what build/kernels lacks. kernels.tar in OUT holds the objects for another machine with the same
#              nvcc and the same FLASH_ATTN_EXT_ARCHS: unpacked in the repository there, they are only linked.
#   test       the whole suite, on every backend that the machine runs; TEST_ARGS goes to pytest instead of `tests`, so
#              that the suite can be split: TEST_ARGS="tests/features -k 'bfloat16 or float16'"
#   fuzz       FUZZ_PROBLEMS (2000) random problems, and as many with a cache, on BACKEND (sm80), numbered from
#              FUZZ_FIRST (0), by FUZZ_JOBS processes (half the cores); the number in a failing test's name repeats it.
#              On sm90, those that it does not take are skipped; long ones are in tests/cuda/test_long_problems.py
#   memcheck   compute-sanitizer on BACKEND over a reduced suite: SANITIZE_PROBLEMS (60) random problems, as many with a
#              cache, tile edges.
#              Our kernels run; what they compute is compared with nothing (pytest --run-only).
#   racecheck  the same for races in shared memory
#   sanitize   both
#   bench      every suite beside PyTorch's kernels and the goals of benchmarks/goals.py; BENCH_ARGS goes to it
#   demo       trains a small GPT with our attention and with PyTorch's
#   demo-large tokens/s of whole training steps of a GPT of 92M parameters at context 8192 with both, on a GPU of 80 GB;
#              only when it is named; DEMO_ARGS goes to it, such as --compile
#
# FLASH_ATTN_EXT_COMMIT names the commit for reports where this folder is a copy without its history.
# PYTHON names an interpreter that has torch, ninja and pytest. OUT, a folder, receives logs, figures and objects.
# A part that fails, other than build, does not keep the next from running; the exit status says whether one did.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
backend=${BACKEND:-sm80}
mkdir -p "${OUT:=build/gpu_check}"
out=$(cd "$OUT" && pwd)
random_problems=(tests/features/test_combinations.py tests/features/test_cache_combinations.py)

run_pytest() { "$python" -m pytest -q -p no:cacheprovider "$@"; }

build() {
  "$python" -m build_support && tar cf "$out/kernels.tar" build/kernels
}

# The host is the slower half of such small problems, so several processes share the GPU.
fuzz() {
  local problems=${FUZZ_PROBLEMS:-2000} first=${FUZZ_FIRST:-0} jobs=${FUZZ_JOBS:-$((($(nproc) + 1) / 2))}
  local share job pids=() status=0
  share=$(((problems + jobs - 1) / jobs))
  for ((job = 0; job < jobs; job++)); do
    OMP_NUM_THREADS=1 run_pytest "${random_problems[@]}" -k "$backend" \
      --first-problem $((first + job * share)) --random-problems "$share" >"$out/fuzz_$job.log" 2>&1 &
    pids+=($!)
  done
  for ((job = 0; job < jobs; job++)); do
    wait "${pids[job]}" || status=1
    echo "problems $((first + job * share)) to $((first + (job + 1) * share - 1)): $(tail -n 1 "$out/fuzz_$job.log")"
    grep -E '^FAILED|^ERROR' "$out/fuzz_$job.log"
  done
  return $status
}

# Only our own kernels are instrumented. Nothing is compared: racecheck breaks down in the reference's backward pass
# ("failed to handle a hardware exception"). Without torch's caching allocator every tensor is an allocation of its own,
# so that what lies behind its end is out of bounds.
sanitize_with() {
  local tool=$1 sanitizer
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer) || return
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" --target-processes all --error-exitcode 86 \
    --kernel-name kns=flash_attn_ext --report-api-errors no --print-limit 20 \
    "$python" -m pytest -q -p no:cacheprovider "${random_problems[@]}" \
    tests/features/test_shapes.py::test_matches_float64 --run-only --random-problems "${SANITIZE_PROBLEMS:-60}" \
    -k "$backend and (random_problem or bfloat16 or float32)"
}

run_part() {
  case "$1" in
    build) build ;;
    test) eval "run_pytest ${TEST_ARGS:-tests}" ;;
    fuzz) fuzz ;;
    memcheck | racecheck) sanitize_with "$1" ;;
    bench)
      PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" "$python" benchmarks/bench.py --device cuda --output "$out" \
        --goals benchmarks/goals.py ${BENCH_ARGS:-}
      ;;
    demo) make demo NO_VENV=1 PYTHON="$python" DEMO_ARGS="--out '$out/demo'" ;;
    demo-large)
      make demo-large NO_VENV=1 PYTHON="$python" DEMO_ARGS="--json '$out/cuda_training.json' ${DEMO_ARGS:-}"
      ;;
  esac
}

parts=()
[ $# -gt 0 ] || set -- build test fuzz sanitize bench demo
for part in "$@"; do
  case "$part" in
    build | test | fuzz | memcheck | racecheck | bench | demo | demo-large) parts+=("$part") ;;
    sanitize) parts+=(memcheck racecheck) ;;
    *)
      echo "gpu_check.sh: unknown part '$part'; allowed: build test fuzz memcheck racecheck sanitize bench demo demo-large" >&2
      exit 2
      ;;
  esac
done

failed=()
for part in "${parts[@]}"; do
  echo "== $part"
  start=$SECONDS
  run_part "$part" 2>&1 | tee "$out/$part.log"
  status=${PIPESTATUS[0]}
  echo "== $part: exit status $status after $((SECONDS - start)) s"
  [ "$status" -eq 0 ] && continue
  failed+=("$part")
  [ "$part" = build ] && break
done
[ ${#failed[@]} -eq 0 ] || echo "gpu_check.sh: failed: ${failed[*]}"
[ ${#failed[@]} -eq 0 ]
