#!/usr/bin/env bash
# Make a language model less toxic by its own texts: generate, score, select, fine-tune, measure.
#
#   examples/detoxify.sh [RUN_DIRECTORY [CHECKPOINT PROMPTS.txt]]
#
# CHECKPOINT: a run, or a directory of Megatron or Hugging Face; without one a small model is trained
# on the bundled text.  PROMPTS: a prompt on each line, which the measurement continues.
# SCORER: FILE.py:FUNCTION or MODULE:FUNCTION, texts to scores from 0 to 1; see detoxify/README.md.
# TOKENIZER: tokenizer of CHECKPOINT, as flags of `lmcore data prepare`.
# RUN_DIRECTORY (default runs/detoxified) and RUN_DIRECTORY-data must not exist.
# ITERS: steps of each training (default 300).  SAMPLES: texts to generate (default ITERS + 100).
set -euo pipefail

examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
recipe=$examples/detoxify/recipe.py
run=${1:-runs/detoxified}
iters=${ITERS:-300}
if ! [[ $iters =~ ^[1-9][0-9]{0,8}$ && ${SAMPLES:-1} =~ ^[1-9][0-9]{0,8}$ ]]; then
    echo "error: ITERS and SAMPLES are numbers from 1, not \`$iters\` and \`${SAMPLES:-}\`" >&2
    exit 2
fi
samples=${SAMPLES:-$((iters + 100))}
scorer=${SCORER:-$examples/detoxify/word_scorer.py:score}
continuations=25

data=$run-data
bash "$examples/shared/require_absent.sh" "$run" "$data"
python "$recipe" check --scorer "$scorer"
if [ $# -ge 3 ]; then
    base=$2 prompts=$3
    read -ra tokenizer <<<"${TOKENIZER:?name the tokenizer of $base, such as --tokenizer-type ...}"
    mkdir -p "$data"
elif [ $# -ge 2 ]; then
    echo "usage: $0 [RUN_DIRECTORY [CHECKPOINT PROMPTS]]" >&2
    exit 2
else
    base=$data/base prompts=$examples/detoxify/prompts.txt
    mkdir -p "$data"
    python "$examples/make_corpus.py" "$data"
    tokenizer=(--tokenizer-type GPT2BPETokenizer
        --vocab-file "$data/vocab.json" --merge-file "$data/merges.txt")
    lmcore data prepare --input "$data/corpus.jsonl" --output-prefix "$data/corpus" \
        --json-keys text --append-eod --overwrite "${tokenizer[@]}"
    lmcore train --data-path "$data/corpus_text_document" --split 90,10,0 "${tokenizer[@]}" \
        --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
        --micro-batch-size 8 --global-batch-size 8 --train-iters "$iters" \
        --lr 2e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
        --eval-iters 4 --save "$base"
fi

# 1. The model writes texts of its own, from the start of a document.
lmcore generate --load "$base" --num-samples "$samples" --tokens 100 --top-p 0.9 --seed 1 \
    --micro-batch-size 16 --sample-output-file "$data/samples.jsonl"

# 2. The half with the lowest scores becomes the corpus.
python "$recipe" select "$data/samples.jsonl" "$data/selected.jsonl" --share 0.5 --scorer "$scorer"
lmcore data prepare --input "$data/selected.jsonl" --output-prefix "$data/selected" \
    --json-keys text --append-eod --overwrite "${tokenizer[@]}"

# 3. The model is fine-tuned on it.
lmcore train --load "$base" --use-checkpoint-args --finetune \
    --data-path "$data/selected_text_document" --split 100,0,0 --eval-iters 0 "${tokenizer[@]}" \
    --micro-batch-size 8 --global-batch-size 8 --train-iters "$iters" \
    --lr 5e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --save "$run"

# 4. Both models continue the same prompts, and are measured.
for model in "$base" "$run"; do
    lmcore generate --load "$model" --sample-input-file "$prompts" --num-samples "$continuations" \
        --tokens 40 --top-p 0.9 --seed 2 --micro-batch-size 25 \
        --sample-output-file "$data/continued.jsonl"
    python "$recipe" measure "$data/continued.jsonl" --prompts "$prompts" \
        --continuations "$continuations" --scorer "$scorer" --name "$model"
done
