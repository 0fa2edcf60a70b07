#!/usr/bin/env bash
# A GPT-2 for Turkish: tokenizer, data, pretraining, evaluation, fine-tuning and generation.
#
#   examples/turkish_gpt2.sh [RUN_DIRECTORY [CORPUS.jsonl HELD_OUT.txt TRAIN.tsv VALID.tsv]]
#
# CORPUS: a file or glob of JSON lines with the key "text", plain or .gz, .xz, .zst.  HELD_OUT: text
# that is not in it.  TRAIN, VALID: tables with the columns "text" and "label", for a classifier.
# Without them small ones are made.  SETTINGS: a YAML file of settings in place of the small model,
# such as turkish_gpt2/gpt2-345m.yaml.  ITERS: steps to train (default 300), of SETTINGS those of the
# file.  VOCAB_SIZE: tokens of the vocabulary (default 512).
# RUN_DIRECTORY (default runs/turkish) and RUN_DIRECTORY-data must not exist.
# Needs the package lmcore-data-tools, for the tokenizer.
set -euo pipefail

examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run=${1:-runs/turkish}
iters=${ITERS:-300}
data=$run-data
bash "$examples/shared/require_absent.sh" "$run" "$data"
bash "$examples/shared/require_inputs.sh" "$0 [RUN_DIRECTORY [CORPUS HELD_OUT TRAIN VALID]]" 5 "$@"
mkdir -p "$data"
if [ $# -ge 5 ]; then
    corpus=$2 held_out=$3 train=$4 valid=$5
else
    python "$examples/turkish_gpt2/make_text.py" "$data"
    corpus=$data/corpus.jsonl held_out=$data/held_out.txt
    train=$data/train.tsv valid=$data/valid.tsv
fi

# 1. A vocabulary of Turkish words and suffixes; the English one of GPT-2 cuts them into letters.
lmcore data train-tokenizer --input "$corpus" --output-dir "$data/tokenizer" \
    --vocab-size "${VOCAB_SIZE:-512}"
tokenizer=(--tokenizer-type GPT2BPETokenizer
    --vocab-file "$data/tokenizer/vocab.json" --merge-file "$data/tokenizer/merges.txt")

# 2. The data.
lmcore data prepare --input "$corpus" --output-prefix "$data/corpus" --append-eod "${tokenizer[@]}"

# 3. Pretraining.
if [ -n "${SETTINGS:-}" ]; then
    settings=("$SETTINGS")
else
    settings=(--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64
        --micro-batch-size 8 --global-batch-size 8 --train-iters "$iters"
        --lr 2e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 --eval-iters 4)
fi
lmcore train "${settings[@]}" --data-path "$data/corpus_text_document" --split 949,50,1 \
    "${tokenizer[@]}" --save "$run"

# 4. The perplexity of text that it has not seen, for each token and each word.
lmcore evaluate "$run" --text "$held_out" --output "$run/scores.json"

# 5. Fine-tuning: a classifier, whose accuracy is measured in training and in its checkpoint.
lmcore train --load "$run" --use-checkpoint-args --finetune --task classification \
    --task-data "$train" --task-valid-data "$valid" --micro-batch-size 8 --global-batch-size 8 \
    --train-iters "$iters" --lr 1e-3 --eval-interval "$iters" --save "$run-classifier"

# 6. Text.
lmcore generate --load "$run" --prompt "Ayşe yarın" --tokens 20 --temperature 0.8 --seed 1
