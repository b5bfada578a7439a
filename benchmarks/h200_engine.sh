#!/usr/bin/env bash
# The records benchmarks/records/h200-27b-engine and h200-4b-engine: about seven minutes on one H200, no download.
set -euo pipefail
panscan samples samples
for shape in 27b 4b; do
  panscan bench --random-weights --model-shape $shape --runner generate,engine --dataset samples/questions.jsonl \
    --num-samples 16 --max-new-tokens 64 --ignore-eos --preprocess device --batch-size 1,8
done
