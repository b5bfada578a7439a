#!/usr/bin/env bash
# The workloads on H200 GPUs, no download: W1 and W2 on 27B shapes, W4 (W1 on 4B and 12B shapes), each on one GPU; with two GPUs also W1
# with tensor parallelism, and with both limited to 40 GB. Each writes its own record.
set -euo pipefail
records=benchmarks/records
python -m benchmarks.workloads.w1 --model-shape 27b --random-weights --output $records/w1-27b.json
python -m benchmarks.workloads.w2 --model-shape 27b --random-weights --output $records/w2-27b.json
python -m benchmarks.workloads.w1 --model-shape 4b --random-weights --output $records/w4-4b.json
python -m benchmarks.workloads.w1 --model-shape 12b --random-weights --output $records/w4-12b.json
if [ "$(nvidia-smi --list-gpus | wc -l)" -ge 2 ]; then
  tp2="--model-shape 27b --random-weights --tensor-parallel-size 2"
  python -m benchmarks.workloads.w1 $tp2 --output $records/w1-27b-tp2.json
  python -m benchmarks.workloads.w1 $tp2 --gpu-memory-gb 40 --brief --compared 1 --output $records/w1-27b-tp2-40gb.json
fi
