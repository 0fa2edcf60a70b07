#!/usr/bin/env bash
# From raw text to an answered question: a vocabulary, a BERT, two encoders (ICT), an index, a search.
#
#   examples/find_answers.sh [RUN_DIRECTORY [CORPUS.jsonl [QUESTION]]]
#
# CORPUS: JSON lines with the key "text", plain or compressed.  Without one: the Wikipedia passages in
# ../shared/data if they are there, else the bundled text.  The encoders share their weights, which
# such a small corpus needs: `--biencoder-shared-query-context-model`.
# ITERS: steps to train the encoders (default 400, some minutes on 2 CPU cores); BERT trains as long.
set -euo pipefail

examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
passages=$examples/../../shared/data/corpora/wiki/boolq-wikipedia-passages.jsonl.gz
run=${1:-runs/answers}
question=${3:-Where is the fuel ethanol made of sugarcane?}
iters=${ITERS:-400}

data=$run-data
mkdir -p "$data"
rm -rf "$data/vocabulary" "$data/index" "$data/bert"
if [ $# -ge 2 ]; then
    corpus=$2
elif [ -f "$passages" ]; then
    corpus=$passages
else
    python "$examples/make_corpus.py" "$data"
    corpus=$data/corpus.jsonl
fi

lmcore data train-tokenizer \
    --input "$corpus" --output-dir "$data/vocabulary" \
    --tokenizer-type BertWordPieceLowerCase --vocab-size 8000

lmcore data prepare \
    --input "$corpus" --output-prefix "$data/corpus" \
    --split-sentences --sentence-splitter sentencex \
    --tokenizer-type BertWordPieceLowerCase --vocab-file "$data/vocabulary/vocab.txt" \
    --workers 2 --overwrite

model="--num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 64"

# shellcheck disable=SC2086  # the model's flags are words
lmcore train --model-family bert \
    --data-path "$data/corpus_text_sentence" $model \
    --micro-batch-size 32 --train-iters "$iters" --lr 1e-3 --lr-warmup-fraction 0.1 \
    --eval-iters 0 --save "$data/bert"

# shellcheck disable=SC2086
lmcore train --model-family ict --bert-load "$data/bert" \
    --biencoder-shared-query-context-model --retriever-score-scaling \
    --data-path "$data/corpus_text_sentence" --split 90,10,0 $model \
    --micro-batch-size 48 --train-iters "$iters" --lr 5e-4 --lr-warmup-fraction 0.1 \
    --eval-interval "$iters" --eval-iters 4 --save "$run"

lmcore index build "$run" --data-path "$data/corpus_text_sentence" --output "$data/index"
lmcore index search "$data/index" "$question" --top 3
