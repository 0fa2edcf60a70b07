#!/usr/bin/env bash
# BERT, its RACE and MNLI, Retro, and the server of a GPT: the other models of Argonne's
# Megatron-DeepSpeed, with the arguments of its README.
#
#   examples/argonne_models.sh [RUN_DIRECTORY [CORPUS.json TASK_DATA]]
#
# CORPUS: JSON lines with the key "text"; TASK_DATA: the folders RACE and glue_data as they are
# unpacked.  Without them small ones are made.
# ITERS: steps to train the BERT, the GPT and the Retro (default 200); EPOCHS: of RACE and MNLI
# (default 3), TASK_LR: their learning rate (default 1e-3).
# RUN_DIRECTORY (default runs/argonne-models) and RUN_DIRECTORY-data must not exist.
# Needs the packages lmcore-data-tools, for the vocabularies, lmcore-serve and sentencex.
# T5 is in train_t5.sh, ICT and its index in find_answers.sh, detoxification in detoxify.sh.
set -euo pipefail

examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run=${1:-runs/argonne-models}
iters=${ITERS:-200}
lr=${TASK_LR:-1e-3}
data=$run-data
bash "$examples/shared/require_absent.sh" "$run" "$data"
bash "$examples/shared/require_inputs.sh" "$0 [RUN_DIRECTORY [CORPUS TASK_DATA]]" 3 "$@"
lmcore data train-tokenizer --help >/dev/null  # an absent package is named before there are files
lmcore serve --help >/dev/null
python -c 'import sentencex' 2>/dev/null || { echo "error: run \`pip install sentencex\`" >&2; exit 2; }
mkdir -p "$data"
if [ $# -ge 3 ]; then
    corpus=$2 tasks=$3
else
    python "$examples/argonne_llama/make_text.py" "$data"
    corpus=$data/corpora/wiki/wiki-0000.json.gz tasks=$data
fi

# 1. A vocabulary for BERT, and one for GPT-2's tokenizer.
for type in BertWordPieceLowerCase GPT2BPETokenizer; do
    lmcore data train-tokenizer --input "$corpus" --output-dir "$data/$type" \
        --tokenizer-type "$type" --vocab-size 500
done
gpt2=(--tokenizer-type GPT2BPETokenizer --vocab-file "$data/GPT2BPETokenizer/vocab.json"
    --merge-file "$data/GPT2BPETokenizer/merges.txt")
bert=(--tokenizer-type BertWordPieceLowerCase
    --vocab-file "$data/BertWordPieceLowerCase/vocab.txt")

# 2. The data of BERT, in sentences, and of GPT, in documents.
lmcore data prepare --input "$corpus" --output-prefix "$data/my-bert" --split-sentences \
    --sentence-splitter sentencex --workers 2 "${bert[@]}"
lmcore data prepare --input "$corpus" --output-prefix "$data/my-gpt2" --dataset-impl mmap \
    --append-eod --workers 2 "${gpt2[@]}"

# 3. BERT, and RACE and MNLI with the arguments of `tasks/main.py`.
model=(--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64
    --max-position-embeddings 64)
lmcore train --model-family bert --data-path "$data/my-bert_text_sentence" --split 949,50,1 \
    "${model[@]}" --micro-batch-size 4 --global-batch-size 8 --train-iters "$iters" --lr 1e-3 \
    --lr-warmup-fraction .01 --eval-iters 0 --save "$data/bert" "${bert[@]}"
common=("${model[@]}" --vocab-file "$data/BertWordPieceLowerCase/vocab.txt"
    --tokenizer-type BertWordPieceLowerCase --pretrained-checkpoint "$data/bert"
    --activations-checkpoint-method uniform --save-interval 10000 --log-interval 100
    --eval-interval 1000 --eval-iters 10 --weight-decay 1.0e-1 --epochs "${EPOCHS:-3}")
lmcore evaluate --task RACE "${common[@]}" --train-data "$tasks/RACE/train/middle" \
    --valid-data "$tasks/RACE/dev/middle" "$tasks/RACE/dev/high" --save "$run-race" \
    --micro-batch-size 4 --lr "$lr" --lr-warmup-fraction 0.06
lmcore evaluate --task MNLI "${common[@]}" --train-data "$tasks/glue_data/MNLI/train.tsv" \
    --valid-data "$tasks/glue_data/MNLI/dev_matched.tsv" \
    "$tasks/glue_data/MNLI/dev_mismatched.tsv" --save "$run-mnli" \
    --micro-batch-size 8 --lr "$lr" --lr-warmup-fraction 0.065

# 4. Retro: the neighbours of the samples by that BERT, then a model that reads them.
retro=(--data-path "$data/my-gpt2_text_document" --seq-length 64 --global-batch-size 8
    --train-iters "$iters" --eval-iters 0 --retro-project-dir "$data/retro"
    --retro-chunk-length 16)
lmcore data retro "${retro[@]}" --retro-encoder "$data/bert" --retro-query-num-neighbors-query 20 \
    --retro-query-num-neighbors-save 4
lmcore train --model-family retro "${retro[@]}" --num-layers 6 --hidden-size 64 \
    --num-attention-heads 2 --micro-batch-size 4 --lr 2e-3 --save "$data/retro-run"

# 5. GPT, with the server and its clients: the published request, and a line on standard input.
lmcore train --data-path "$data/my-gpt2_text_document" --split 949,50,1 "${model[@]}" \
    --micro-batch-size 4 --global-batch-size 8 --train-iters "$iters" --lr 2e-3 \
    --lr-decay-style cosine --lr-warmup-fraction .01 --eval-iters 0 --save "$run"
lmcore serve --load "$run" --port 0 --access-log none >"$data/server.txt" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
until address=$(sed -n 's|^serving .* on http://||p' "$data/server.txt") && [ -n "$address" ]; do
    kill -0 "$server" || { cat "$data/server.txt" >&2; exit 1; }
    sleep 0.2
done
body='{"prompts":["Hello world"], "tokens_to_generate":1}'
if command -v curl >/dev/null; then
    curl --silent --show-error --fail "http://$address/api" -X 'PUT' \
        -H 'Content-Type: application/json; charset=UTF-8' -d "$body"
else
    python -c 'import sys, urllib.request as http
head = {"Content-Type": "application/json; charset=UTF-8"}
put = http.Request(sys.argv[1], sys.argv[2].encode(), head, method="PUT")
print(http.urlopen(put).read().decode(), end="")' "http://$address/api" "$body"
fi
echo
echo 'Ada put the' | lmcore ask "$address" --tokens 20
kill "$server"
wait "$server"
