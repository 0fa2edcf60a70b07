#!/usr/bin/env bash
# Train a small GPT on the bundled text, every choice spelled out, and let it write.
#
#   examples/train_bundled.sh [RUN_DIRECTORY]
#
# ITERS: steps to train (default 200, about a minute on 2 CPU cores).
set -euo pipefail

run=${1:-runs/bundled}
iters=${ITERS:-200}

lmcore train \
    --tokenizer-type ByteTokenizer --split 90,10,0 \
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
    --micro-batch-size 8 --global-batch-size 16 --train-iters "$iters" \
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
    --eval-interval "$((iters / 2))" --eval-iters 4 --log-interval 10 \
    --seed 1234 --save "$run"

lmcore generate --load "$run" --prompt "First Citizen:" --tokens 100 --temperature 0.8 --seed 1
