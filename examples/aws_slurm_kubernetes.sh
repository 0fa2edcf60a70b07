#!/usr/bin/env bash
# GPT on Slurm and Kubernetes, scaled down to this machine: data, jobs, training, evaluation.
#
#   examples/aws_slurm_kubernetes.sh [RUN_DIRECTORY]
#
# The jobs for Slurm and Kubernetes are written and checked, and the same commands run here by
# `lmcore launch local`.  ITERS: steps to train (default 100).  RUN_DIRECTORY (default
# runs/launched), RUN_DIRECTORY-data and RUN_DIRECTORY-benchmark must not exist.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
files=$here/aws_slurm_kubernetes
run=${1:-runs/launched}
iters=${ITERS:-100}
data=$run-data
jobs=$data/jobs
bash "$here/shared/require_inputs.sh" "$0 [RUN_DIRECTORY]" 1 "$@"
bash "$here/shared/require_absent.sh" "$run" "$data" "$run-benchmark"
mkdir -p "$jobs"

# 1. Text and vocabulary, in place of the downloads of the original.
python "$here/make_corpus.py" "$data"
tokenizer=(--tokenizer-type GPT2BPETokenizer
    --vocab-file "$data/vocab.json" --merge-file "$data/merges.txt")

# 2. Data preparation: 1.data-preprocessing.sbatch, and the same on Kubernetes and here.
prepare=(data prepare --input "$data/corpus.jsonl" --output-prefix "$data/corpus" --append-eod
    "${tokenizer[@]}")
lmcore launch slurm --profile "$files/slurm-data.yaml" --output "$jobs/1.data.sbatch" "${prepare[@]}"
lmcore launch k8s --profile "$files/kubernetes-data.yaml" --output "$jobs/1.data.yaml" "${prepare[@]}"
lmcore launch local --output "$jobs/1.data.sh" --submit "${prepare[@]}"

# 3. Jobs of the full size: 2.distributed-training.sbatch and pytorchjob.yaml.
full=("$files/gpt.yaml" "${tokenizer[@]}" --data-path "$data/corpus_text_document" --save "$run-full")
lmcore launch slurm --profile "$files/slurm.yaml" --output "$jobs/2.train.sbatch" "${full[@]}"
lmcore launch k8s --profile "$files/kubernetes.yaml" --output "$jobs/pytorchjob.yaml" "${full[@]}"
bash -n "$jobs/1.data.sbatch"
bash -n "$jobs/2.train.sbatch"
python -c 'import sys, yaml; [yaml.safe_load(open(path)) for path in sys.argv[1:]]' "$jobs"/*.yaml

# 4. Training of a small model in two processes here, started again if it fails.
small=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --tensor-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 8
    --train-iters "$iters" --lr 2e-3 --lr-warmup-fraction 0.05 --eval-iters 4)
lmcore launch local --processes-per-node 2 --restarts 1 --output "$jobs/2.train.sh" --submit \
    train "${small[@]}" "${tokenizer[@]}" --data-path "$data/corpus_text_document" --split 98,2,0 \
    --save "$run"

# 5. Benchmark mode: throughput without validation, test and checkpoints.
lmcore train "${small[@]}" "${tokenizer[@]}" --data-path "$data/corpus_text_document" --split 100,0,0 \
    --nproc-per-node 2 --eval-iters 0 --train-iters 12 --save-interval-mins 0 --no-save-final \
    --save "$run-benchmark"
python "$files/throughput.py" "$run-benchmark"
if [ -n "$(find "$run-benchmark" -name 'iter_*')" ]; then
    echo "error: the benchmark saved a checkpoint" >&2
    exit 1
fi

# 6. The checkpoint, evaluated, and some text of it.
python - "$data" <<'PYTHON'
import json, pathlib, sys

data = pathlib.Path(sys.argv[1])
last = data.joinpath("corpus.jsonl").read_text("utf-8").splitlines()[-1]
data.joinpath("text.txt").write_text(json.loads(last)["text"], "utf-8")
PYTHON
lmcore evaluate "$run" --text "$data/text.txt" --output "$run/scores.json"
lmcore generate --load "$run" --prompt "The" --tokens 20 --temperature 0.8 --seed 1
