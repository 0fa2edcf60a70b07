#!/usr/bin/env bash
# BigScience's GPT and BLOOM: data in parts, a launch script of Megatron-DeepSpeed, ZeRO with a
# pipeline, ALiBi, other layouts and formats of checkpoints, evaluation, text.
#
#   examples/bigscience_deepspeed.sh [RUN_DIRECTORY [CORPUS.jsonl VOCAB.json MERGES.txt HELD_OUT.txt]]
#
# CORPUS: JSON lines with the key "text".  HELD_OUT: text that is not in it.  Without them small ones
# are made.  SETTINGS: a YAML file of settings in place of the small BLOOM, such as
# bigscience_deepspeed/bloom-176b.yaml.  ITERS: steps to train (default 50).
# RUN_DIRECTORY (default runs/bigscience) and RUN_DIRECTORY-* must not exist.
set -euo pipefail

examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
original=$examples/bigscience_deepspeed
run=${1:-runs/bigscience}
iters=${ITERS:-50}
data=$run-data
bash "$examples/shared/require_absent.sh" "$run" "$data" "$run"-{gpt.yaml,bloom,bloom-hf,tp2,merged,tensorboard}
bash "$examples/shared/require_inputs.sh" "$0 [RUN_DIRECTORY [CORPUS VOCAB MERGES HELD_OUT]]" 5 "$@"
mkdir -p "$data"
if [ $# -ge 5 ]; then
    corpus=$2 vocab=$3 merges=$4 held_out=$5
else
    python "$examples/make_corpus.py" "$data"
    corpus=$data/small.jsonl vocab=$data/vocab.json merges=$data/merges.txt held_out=$data/held_out.txt
    head -n 190 "$data/corpus.jsonl" > "$corpus"
    tail -n 2 "$data/corpus.jsonl" | python -c \
        'import json, sys; [print(json.loads(line)["text"]) for line in sys.stdin]' > "$held_out"
fi
tokenizer=(--tokenizer-type GPT2BPETokenizer --vocab-file "$vocab" --merge-file "$merges")

# 1. The data in two parts, merged to one dataset.
python - "$corpus" "$data" <<'END'
import itertools, pathlib, sys
source, folder = map(pathlib.Path, sys.argv[1:])
with source.open() as lines, (folder / "p1.jsonl").open("w") as one, (folder / "p2.jsonl").open("w") as two:
    for line, part in zip(lines, itertools.cycle((one, two))):
        part.write(line)
END
for part in p1 p2; do
    lmcore data prepare --input "$data/$part.jsonl" --output-prefix "$data/$part" \
        --dataset-impl mmap --append-eod --workers 2 "${tokenizer[@]}"
done
lmcore data merge --datasets "$data/p1_text_document" "$data/p2_text_document" \
    --output-prefix "$data/merged_text_document"

# 2. The published launch script: two data-parallel processes, ZeRO, fp16, a growing batch.
lmcore migrate "$original/pretrain_gpt.sh" --defaults bigscience --output "$run-gpt.yaml" --set \
    RUN="$run" DATA="$data/merged_text_document" VOCAB_FILE="$vocab" MERGE_FILE="$merges" \
    SEQ_LENGTH=128 TRAIN_SAMPLES=$((2 * iters)) LR=2e-3 BACKEND=gloo
lmcore train "$run-gpt.yaml" --nproc-per-node 2

# 3. Its checkpoint for two tensor-parallel processes, then merged to two stages of a pipeline.
lmcore checkpoint convert "$run" "$run-tp2" --to megatron --tensor-model-parallel-size 2
lmcore checkpoint convert "$run-tp2" "$run-merged" --to megatron --pipeline-model-parallel-size 2

# 4. ALiBi and normalized embeddings: a pipeline of two stages, two processes for each, ZeRO, bf16,
#    with a configuration file of DeepSpeed.
if [ -n "${SETTINGS:-}" ]; then
    settings=("$SETTINGS")
else
    settings=(--num-layers 2 --hidden-size 72 --num-attention-heads 6 --seq-length 128
        --position-embedding-type alibi --embed-layernorm --pipeline-model-parallel-size 2
        --rampup-batch-size 4 4 $((2 * iters)) --global-batch-size 8 --train-samples $((6 * iters))
        --lr 2e-3 --lr-warmup-samples 5 --checkpoint-activations --nproc-per-node 4
        --engine native --deepspeed_config "$original/ds_config.json")
fi
lmcore train "${settings[@]}" --data-path "$data/merged_text_document" "${tokenizer[@]}" \
    --save "$run-bloom"

# 5. BLOOM of Hugging Face, and its perplexity and text, computed from there.
lmcore checkpoint convert "$run-bloom" "$run-bloom-hf" --to huggingface
lmcore evaluate "$run-bloom-hf" --text "$held_out" --output "$run-bloom/scores.json"
lmcore generate --load "$run-bloom-hf" --prompt "The king" --tokens 20 --temperature 0.8 --seed 1

# 6. The GPT: the perplexity of WikiText's form by words, and two samples.
lmcore evaluate "$run" --task WIKITEXT103 --valid-data "$held_out" --output "$run/scores.json"
lmcore generate --load "$run" --out-seq-length 20 --temperature 1.0 --top-p 0.9 --num-samples 2 \
    --sample-output-file "$run/samples.json" --seed 1
cat "$run/samples.json"
