#!/usr/bin/env bash
# W3: mixed documents that arrive over time, at 50, 80 and 95% of capacity, on 27B shapes. No download.
#
#   benchmarks/h200_w3.sh             # all sides: on two GPUs in parallel, about six minutes
#   benchmarks/h200_w3.sh vllm        # some sides: panscan, unpaced (no TPOT target) or vllm
#   RATES=inf SHAPE=4b NUM_PROMPTS=256 GPU_MEMORY=0.8 benchmarks/h200_w3.sh panscan vllm    # throughput of the servers
#
# All sides get the same requests at the same times. Records: benchmarks/records/w3-27b-SIDE. vLLM 0.26 must be
# installed, or VLLM_PATH name the folder that holds it; it runs with exact attention, CUDA graphs of its encoder and
# four API servers, as one prepares images too slowly. SHAPE, RATES and NUM_PROMPTS select another shape, other rates
# (requests/s) and another number of requests per rate; GPU another GPU, GPU_MEMORY vLLM's share of it.
set -euo pipefail
shape=${SHAPE:-27b}
rates=${RATES:-3.3,5.3,6.3}
prompts=${NUM_PROMPTS:-128}
work=$(mktemp -d)

# serve SIDE PORT: replace this shell by the side's server.
serve() {
  case $1 in
    panscan) exec panscan serve --random-weights --model-shape "$shape" --preprocess device --port "$2" ;;
    unpaced) exec panscan serve --random-weights --model-shape "$shape" --preprocess device --tpot-target-ms none --port "$2" ;;
    vllm)
      export PYTHONPATH=${VLLM_PATH:-}${VLLM_PATH:+:}${PYTHONPATH:-}
      exec python -m vllm.entrypoints.cli.main serve "$work/shape" --load-format dummy --dtype bfloat16 \
        --served-model-name "$shape shape, random weights" --api-server-count 4 \
        --attention-backend TRITON_ATTN --max-model-len 4096 --max-num-seqs 128 \
        --gpu-memory-utilization "${GPU_MEMORY:-0.9}" \
        --limit-mm-per-prompt '{"image": 1}' --mm-processor-kwargs '{"do_pan_and_scan": true}' \
        --compilation-config '{"max_cudagraph_capture_size": 128, "cudagraph_mm_encoder": true}' \
        --host 127.0.0.1 --port "$2" ;;
    *) echo "unknown side $1: use panscan, unpaced or vllm" >&2; exit 2 ;;
  esac
}

# measure SIDE GPU: start its server on one GPU, send all levels, keep the record. Fails as soon as the server does.
measure() {
  local port=$((8100 + $2)) records=benchmarks/records/w3-$shape-$1 server load status=0 every_token=()
  if [ "$1" != vllm ]; then  # random weights choose tokens without text, for which panscan sends no chunk otherwise
    every_token=(--extra-body '{"stream_options": {"continuous_usage_stats": true}}')
  fi
  (CUDA_VISIBLE_DEVICES=$2 serve "$1" "$port") >"$work/$1.log" 2>&1 &
  server=$!
  panscan load "http://127.0.0.1:$port" --scenario mixed-documents --ignore-eos --request-rate "$rates" \
    --num-prompts "$prompts" --num-warmups 8 --goodput ttft:2000 --goodput tpot:50 --ready-check-timeout-sec 240 \
    --output-dir "$work/$1" "${every_token[@]}" &
  load=$!
  wait -n "$server" "$load" || status=$?  # whichever ends first: the server only if it fails
  kill "$server" "$load" 2>/dev/null || true
  wait "$server" "$load" || true
  if [ ! -s "$work/$1"/*/records.jsonl ] || [ "$status" -ne 0 ]; then
    tail -n 40 "$work/$1.log" >&2
    return 1
  fi
  mkdir -p "$records"
  sed "s#$work/##g" "$work/$1"/*/records.jsonl >"$records/records.jsonl"
}

python - "$shape" "$work/shape" <<'PYTHON'
import sys
from pathlib import Path

from panscan.model.bundled.random_weights import write_shape

write_shape(sys.argv[1], Path(sys.argv[2]))
PYTHON
if [ $# -gt 0 ]; then
  for side in "$@"; do measure "$side" "${GPU:-0}"; done
elif [ "$(nvidia-smi --list-gpus | wc -l)" -ge 2 ]; then
  measure vllm 1 &
  other=$!
  measure panscan 0
  measure unpaced 0
  wait "$other"
else
  for side in panscan unpaced vllm; do measure "$side" 0; done
fi
