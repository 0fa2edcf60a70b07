#!/usr/bin/env bash
# Install a plugin without a device, and train on its text with its tokenizer and its setting.
#
#   examples/train_extension.sh [RUN_DIRECTORY]
#
# The plugin, examples/plugin_extension, goes into a folder beside the run, not into the environment.
# ITERS: steps to train (default 200, half a minute on 2 CPU cores).
set -euo pipefail

examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run=${1:-runs/extension}
iters=${ITERS:-200}

# pip builds in place: a copy keeps the sources clean.  With a recent setuptools here it needs no network.
mkdir -p "$run-plugin"
site=$(cd "$run-plugin" && pwd)
cp -r "$examples/plugin_extension" "$site/source"
recent='import setuptools, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)'
isolation=$(python -c "$recent" 2>/dev/null && echo --no-build-isolation || true)
# Pins for what a build installs cannot be given where it installs nothing.
[ -z "$isolation" ] || unset PIP_BUILD_CONSTRAINT
python -m pip install --quiet --disable-pip-version-check --no-deps $isolation \
    --target "$site/site" "$site/source"
export PYTHONPATH=$site/site${PYTHONPATH:+:$PYTHONPATH}

lmcore data corpora >&2
lmcore train \
    --corpus arithmetic --tokenizer-type ArithmeticTokenizer --example-record-events \
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --split 90,10,0 \
    --micro-batch-size 16 --train-iters "$iters" --lr 2e-3 --lr-decay-style cosine \
    --eval-interval "$((iters / 2))" --eval-iters 4 --sample-tokens 0 --save "$run"
cat "$run/events.jsonl" >&2

lmcore generate --load "$run" --prompt "12+30=" --tokens 40 --greedy
