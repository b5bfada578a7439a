#!/usr/bin/env bash
# 27B shapes on 2, 4 or 8 GPUs of one machine, no download: W1 with tensor parallelism, and replicas by layout, over
# HTTP and as batch jobs. All records in less than nine minutes on eight H100s; benchmarks/many_gpus.py has the details.
#
#   benchmarks/many_gpus.sh FOLDER                     # all jobs that fit on this machine
#   benchmarks/many_gpus.sh FOLDER serve-4x2 w1-tp4    # some of them, such as those that a first call left out
#   benchmarks/many_gpus.sh FOLDER faults-4x2          # kill -9 of a replica and of a rank under load: four minutes
#   benchmarks/many_gpus.sh FOLDER --device cpu --model tiny --gpus 8     # rehearsal: 8 GB, minutes
set -euo pipefail
exec python -m benchmarks.many_gpus "$@"
