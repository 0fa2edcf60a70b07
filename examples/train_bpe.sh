#!/usr/bin/env bash
# From JSON lines to generated text with a GPT-2 vocabulary, in three commands.
#
#   examples/train_bpe.sh [RUN_DIRECTORY [CORPUS.jsonl VOCAB.json MERGES.txt]]
#
# CORPUS: a file or glob of JSON lines with the key "text", plain or .gz, .xz, .zst.  Without one: the
# web pages in ../shared/data if they are there, else the bundled text with a vocabulary of its own.
# ITERS: steps to train (default 300, a few minutes on 2 CPU cores).
set -euo pipefail

examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
shared=$examples/../../shared/data
run=${1:-runs/bpe}
iters=${ITERS:-300}

data=$run-data
bash "$examples/shared/require_inputs.sh" "$0 [RUN_DIRECTORY [CORPUS VOCAB MERGES]]" 4 "$@"
mkdir -p "$data"
if [ $# -ge 4 ]; then
    corpus=$2 vocab=$3 merges=$4
elif [ -d "$shared/corpora/web" ]; then
    corpus="$shared/corpora/web/*.jsonl.gz"
    vocab=$shared/tokenizers/gpt2/gpt2-vocab.json
    merges=$shared/tokenizers/gpt2/gpt2-merges.txt
else
    python "$examples/make_corpus.py" "$data"
    corpus=$data/corpus.jsonl vocab=$data/vocab.json merges=$data/merges.txt
fi

lmcore data prepare \
    --input "$corpus" --output-prefix "$data/corpus" --json-keys text \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$vocab" --merge-file "$merges" \
    --append-eod --workers 2 --overwrite

lmcore train \
    --data-path "$data/corpus_text_document" --split 90,10,0 \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$vocab" --merge-file "$merges" \
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
    --micro-batch-size 4 --global-batch-size 8 --train-iters "$iters" \
    --lr 1e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
    --eval-interval "$((iters / 3))" --eval-iters 4 --save "$run"

lmcore generate --load "$run" --prompt "The" --tokens 50 --temperature 0.8 --seed 1
