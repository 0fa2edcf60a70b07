#!/usr/bin/env bash
# A Llama trained further on weighed sources, as Argonne's Megatron-DeepSpeed does on Aurora:
# tokenize, merge by sample count, weigh, convert from Hugging Face, continue training, evaluate.
#
#   examples/argonne_llama.sh [RUN_DIRECTORY [CORPORA EPOCHS.txt LLAMA TASK_DATA]]
#
# CORPORA: a directory with one folder of JSON lines (.json, .jsonl, also .gz, .xz, .zst) for each
# source; EPOCHS: lines of `source epochs`; LLAMA: a Hugging Face Llama with its tokenizer;
# TASK_DATA: wikitext-103 and lambada_test.jsonl.  Without them small ones are made.
# SETTINGS: a YAML file of settings in place of the small ones, such as argonne_llama/training.yaml.
# SAMPLES: documents of each merged file (default 100).  ITERS: steps to train (default 200).
# RUN_DIRECTORY (default runs/argonne) and RUN_DIRECTORY-data must not exist.
# Needs the package lmcore-data-tools for the tokenizer of the small model.  With lmcore-deepspeed the
# checkpoint is written as Megatron-DeepSpeed's, else as Megatron-LM's.
set -euo pipefail

examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run=${1:-runs/argonne}
iters=${ITERS:-200}
samples=${SAMPLES:-100}
data=$run-data
bash "$examples/shared/require_absent.sh" "$run" "$data"
bash "$examples/shared/require_inputs.sh" "$0 [RUN_DIRECTORY [CORPORA EPOCHS LLAMA TASK_DATA]]" 5 "$@"
[ $# -ge 5 ] || lmcore data train-tokenizer --help >/dev/null  # absent: named before there are files
mkdir -p "$data/tokens" "$data/merged"
if [ $# -ge 5 ]; then
    corpora=$2 epochs=$3 llama=$4 tasks=$5
else
    python "$examples/argonne_llama/make_text.py" "$data"
    corpora=$data/corpora epochs=$data/epochs.txt llama=$data/llama tasks=$data
    lmcore data train-tokenizer --input "$corpora" --output-dir "$data/tokenizer" \
        --tokenizer-type Llama2Tokenizer --vocab-size 300
    python "$examples/argonne_llama/make_llama.py" "$llama" "$data/tokenizer/tokenizer.model"
fi
tokenizer=(--tokenizer-type Llama2Tokenizer --tokenizer-model "$llama/tokenizer.model")

# 1. Tokenize each source, and merge it into files of as many samples: arxiv-00000, arxiv-00001, ...
for folder in "$corpora"/*/; do
    source=$(basename "$folder")
    lmcore data prepare --input "$folder" --output-prefix "$data/tokens/$source" \
        --json-keys text --append-eod "${tokenizer[@]}"
    lmcore data split --datasets "$data/tokens/${source}_text_document" \
        --output-prefix "$data/merged/$source" --samples "$samples"
done

# 2. The numbers of tokens, and the weights of the sources by their epochs.
lmcore data weights --input "$data/merged" --metadata-output "$data/tokens.json" \
    --epochs "$epochs" --output "$data/train.list"

# 3. The model of Hugging Face; training could read its directory as it is, too.
lmcore checkpoint convert "$llama" "$data/base" --to lmcore
lmcore checkpoint inspect "$data/base"

# 4. Continued training, in two jobs: the second one begins where the first one stopped.
if [ -n "${SETTINGS:-}" ]; then
    settings=("$SETTINGS")
else
    settings=(--seq-length 128 --micro-batch-size 4 --global-batch-size 8 --train-iters "$iters"
        --lr 2e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1
        --adam-beta2 0.95 --eval-iters 4 --split 90,10,0 --exit-interval "$((iters / 2))")
fi
lmcore train "${settings[@]}" --load "$data/base" --use-checkpoint-args --finetune \
    --data-file-list "$data/train.list" --save "$run"
[ -n "${SETTINGS:-}" ] || lmcore train --continue "$run"

# 5. Word-level perplexity of WikiText-103 and LAMBADA, with the arguments of `tasks/main.py`.
lmcore evaluate --task WIKITEXT103 --load "$run" \
    --valid-data "$tasks/wikitext-103/wiki.test.tokens" --output "$run/wikitext103.json"
lmcore evaluate --task LAMBADA --strict-lambada --load "$run" \
    --valid-data "$tasks/lambada_test.jsonl" --output "$run/lambada.json"

# 6. The way back: to transformers, and to Megatron.
lmcore checkpoint convert "$run" "$run-huggingface" --to huggingface --dtype bfloat16
format=megatron
if python -c 'import lmcore_deepspeed' 2>/dev/null; then format=megatron-deepspeed; fi
lmcore checkpoint convert "$run" "$run-$format" --to "$format" --dtype bfloat16 \
    --tensor-model-parallel-size 2

# 7. Text.
lmcore generate --load "$run" --prompt "Ada put the red lamp in the" --tokens 20 --seed 1
