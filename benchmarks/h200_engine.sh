#!/usr/bin/env bash
# The record benchmarks/records/h200-27b-engine: about five minutes on one H200, no download.
set -euo pipefail
panscan samples samples
panscan bench --random-weights --model-shape 27b --runner generate,engine --dataset samples/questions.jsonl \
  --num-samples 16 --max-new-tokens 64 --ignore-eos --preprocess device --batch-size 1,8
