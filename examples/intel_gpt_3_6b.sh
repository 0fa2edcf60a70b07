#!/usr/bin/env bash
# GPT 3.6B on C4, as Intel's Megatron trains it on its GPUs: merge shards, split, train, evaluate.
#
#   examples/intel_gpt_3_6b.sh [RUN_DIRECTORY [C4 VOCAB.json MERGES.txt HELD_OUT.txt]]
#
# C4: a clone of allenai/c4, whose folder `en` has the shards.  VOCAB, MERGES: GPT-2's vocabulary.
# HELD_OUT: text that is not in it.  Without them small ones are made.
# SETTINGS: a YAML file of settings in place of the small model, such as intel_gpt_3_6b/gpt-3.6b.yaml.
# SHARDS: files to merge the shards into (default 8, or 2 of the small ones).
# PROCESSES: processes that share the optimizer state and gradients (default 2); one for each GPU.
# ITERS: steps to train (default 200), of SETTINGS those of the file.
# RUN_DIRECTORY (default runs/intel) and RUN_DIRECTORY-data must not exist.
# Needs the package lmcore-data-tools, for the vocabulary of the small model.
set -euo pipefail

examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run=${1:-runs/intel}
data=$run-data
bash "$examples/shared/require_absent.sh" "$run" "$data"
bash "$examples/shared/require_inputs.sh" "$0 [RUN_DIRECTORY [C4 VOCAB MERGES HELD_OUT]]" 5 "$@"
if [ $# -ge 2 ] && ! compgen -G "$2/en/c4-train.*.json.gz" > /dev/null; then
    echo "error: \`$2/en\` has no c4-train.*.json.gz; C4 is a clone of allenai/c4" >&2
    exit 2
fi
mkdir -p "$data"
if [ $# -ge 5 ]; then
    mkdir "$data/c4"
    ln -s "$(realpath "$2")/en" "$data/c4/en"  # nothing is written there
    vocab=$3 merges=$4 held_out=$5
else
    python "$examples/intel_gpt_3_6b/make_c4.py" "$data/c4"
    held_out=$data/c4/held_out.txt
    lmcore data train-tokenizer --input "$data/c4/en/c4-train.*.json.gz" \
        --output-dir "$data/tokenizer" --vocab-size 512
    vocab=$data/tokenizer/vocab.json merges=$data/tokenizer/merges.txt
    SHARDS=${SHARDS:-2}
fi

# 1. Merge the shards into a few files, without decompressing them.
shards=("$data"/c4/en/c4-train.*.json.gz)
merged=${SHARDS:-8}
each=$(((${#shards[@]} + merged - 1) / merged))
mkdir -p "$data/c4/en_merge"
for ((shard = 0; shard < merged; shard++)); do
    cat "${shards[@]:shard*each:each}" > "$data/c4/en_merge/c4-train.en_$shard.json.gz"
done

# 2. A fixed split, the same in every run.
lmcore data split --input-files "$data/c4/en_merge/*.json.gz" --output-dir "$data/c4/split" \
    --test-percent 0.05 0.01
gzip "$data"/c4/split/*.json

# 3. The names of the corpora.
cp "$examples/intel_gpt_3_6b/corpora.yaml" "$data/corpora.yaml"
lmcore data corpora --corpora "$data/corpora.yaml"

# 4. Training on two processes, in bf16, with recomputation and ZeRO-2.  The text is prepared first.
if [ -n "${SETTINGS:-}" ]; then
    settings=("$SETTINGS")
else
    settings=(--num-layers 2 --hidden-size 96 --num-attention-heads 4 --seq-length 64
        --micro-batch-size 8 --train-iters "${ITERS:-200}" --lr 2e-3 --lr-decay-style cosine
        --lr-warmup-fraction 0.01 --weight-decay 1e-2 --clip-grad 1.0 --eval-iters 4
        --precision bf16 --recompute full --zero-stage 2)
fi
lmcore train "${settings[@]}" --nproc-per-node "${PROCESSES:-2}" \
    --corpora "$data/corpora.yaml" --train-data c4/train --valid-data c4/dev --test-data c4/test \
    --data-cache-path "$data/cache" --lazy-loader \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$vocab" --merge-file "$merges" --save "$run"

# 5. The perplexity of text that it has not seen, for each token and each word.
lmcore evaluate "$run" --text "$held_out" --output "$run/scores.json"

# 6. Text.
lmcore generate --load "$run" --prompt "The king" --tokens 24 --temperature 0.8 --seed 1
