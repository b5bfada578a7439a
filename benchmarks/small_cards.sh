#!/usr/bin/env bash
# W1 on 27B shapes within the memory of smaller cards, with the model's own KV cache or an 8-bit one; no download. One row per call,
# each below 9 minutes, its verdict included:
#
#   benchmarks/small_cards.sh ROW [auto|int8|fp8] [FOLDER]
#
# Rows: bf16-80gb, int8-40gb, int4-24gb on one GPU; bf16-tp2-40gb, int8-tp2-40gb on two; with "-head" behind, with an int8 head.
# The record is FOLDER/w1-27b-ROW[-int8kv].json. Compare rows and caches of one machine only.
set -euo pipefail
row=$1 cache=${2:-auto} folder=${3:-benchmarks/records}
common="--model-shape 27b --random-weights --brief --repeats 2 --compared 2 --kv-cache-dtype $cache"
case ${row%-head} in
  bf16-80gb) options="--gpu-memory-gb 80 --num-requests 128" ;;
  int8-40gb) options="--gpu-memory-gb 40 --num-requests 64 --quantization int8" ;;
  int4-24gb) options="--gpu-memory-gb 24 --num-requests 48 --quantization int4" ;;
  bf16-tp2-40gb) options="--gpu-memory-gb 40 --num-requests 64 --tensor-parallel-size 2" ;;
  int8-tp2-40gb) options="--gpu-memory-gb 40 --num-requests 64 --tensor-parallel-size 2 --quantization int8" ;;
  *) echo "unknown row: $row" >&2; exit 2 ;;
esac
[ "$row" = "${row%-head}" ] || options="$options --quantize-head int8"
suffix=$([ "$cache" = auto ] || echo "-${cache}kv")
exec timeout 540 python -m benchmarks.workloads.w1 $common $options --output "$folder/w1-27b-$row$suffix.json"
