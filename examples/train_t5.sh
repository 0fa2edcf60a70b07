#!/usr/bin/env bash
# From JSON lines to a T5 for transformers: a tokenizer, sentences with sentinels, training, conversion.
#
#   examples/train_t5.sh [RUN_DIRECTORY [CORPUS.jsonl]]
#
# CORPUS: a file or glob of JSON lines with the key "text" and one sentence per line of a text.
# Without one: the bundled text.  ITERS: steps to train (default 300).
# Needs the package lmcore-data-tools, for the tokenizer.
set -euo pipefail

examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run=${1:-runs/t5}
iters=${ITERS:-300}

data=$run-data
mkdir -p "$data"
if [ $# -ge 2 ]; then
    corpus=$2
else
    python "$examples/make_corpus.py" "$data"
    corpus=$data/corpus.jsonl
fi

[ -d "$data/tokenizer" ] || lmcore data train-tokenizer \
    --input "$corpus" --output-dir "$data/tokenizer" \
    --tokenizer-type BertWordPieceLowerCase --vocab-size 2000

lmcore data prepare \
    --input "$corpus" --output-prefix "$data/corpus" --presplit-sentences \
    --tokenizer-type BertWordPieceLowerCase --vocab-file "$data/tokenizer/vocab.txt" \
    --vocab-extra-ids 100 --overwrite

# The kind of T5 1.1, which Hugging Face has; without these options it is Megatron's.
lmcore train \
    --model-family t5 --data-path "$data/corpus_text_sentence" --split 90,10,0 \
    --position-embedding-type relative --normalization RMSNorm --no-add-bias-linear \
    --no-t5-head-bias --no-t5-scaled-attention --t5-feed-forward gated-gelu \
    --untie-embeddings-and-output-weights \
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
    --micro-batch-size 4 --global-batch-size 8 --train-iters "$iters" \
    --lr 1e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
    --eval-interval "$((iters / 3))" --eval-iters 4 --save "$run"

lmcore checkpoint convert "$run" "$run-huggingface" --to huggingface
