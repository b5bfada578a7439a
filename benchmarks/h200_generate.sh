#!/usr/bin/env bash
# The records benchmarks/records/h200-4b, h200-4b-chunks and h200-27b: about twelve minutes on one H200, no download.
set -euo pipefail
panscan samples samples
shared="--runner generate --random-weights --dataset samples/questions.jsonl --ignore-eos"
panscan bench $shared --model-shape 4b --num-samples 8 --max-new-tokens 32 --batch-size 4 \
  --attn_impl eager,sdpa,flex_attention,flash_attention_2 --cache dynamic,static --preprocess cpu,device
panscan bench $shared --model-shape 4b --num-samples 8 --max-new-tokens 32 --batch-size 4 --preprocess device \
  --prefill-chunk-size none,256,1024
panscan bench $shared --model-shape 27b --num-samples 12 --max-new-tokens 64 --preprocess device \
  --do-pan-and-scan true,false --batch-size 1,4,12
# On a machine of two GPUs, benchmarks/records/h200-x2-one and h200-x2-replicas:
if [ "$(nvidia-smi --list-gpus | wc -l)" -ge 2 ]; then
  for replicas in 1 2; do
    panscan bench $shared --model-shape 4b --num-samples 8 --max-new-tokens 32 --batch-size 4 --preprocess device \
      --repeats 2 --replicas $replicas
  done
fi
