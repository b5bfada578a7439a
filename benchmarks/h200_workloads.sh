#!/usr/bin/env bash
# The workloads on one H200, no download: W1 and W2 on 27B shapes, W4 (W1 on 4B shapes). Each writes its own record.
set -euo pipefail
python -m benchmarks.workloads.w1 --model-shape 27b --random-weights --output benchmarks/records/w1-27b.json
python -m benchmarks.workloads.w2 --model-shape 27b --random-weights --output benchmarks/records/w2-27b.json
python -m benchmarks.workloads.w1 --model-shape 4b --random-weights --output benchmarks/records/w4-4b.json
