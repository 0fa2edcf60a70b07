#!/bin/bash
# Launch script of BigScience's Megatron-DeepSpeed with the flags of its guide: `lmcore migrate`
# reads it and never runs it.  Its sizes are variables, which `--set NAME=VALUE` replaces.
RUN=checkpoints/gpt2
DATA=my-gpt2_text_document
VOCAB_FILE=gpt2-vocab.json
MERGE_FILE=gpt2-merges.txt
SEQ_LENGTH=1024
TRAIN_SAMPLES=100
LR=1e-4
TP_SIZE=1
PP_SIZE=1
ZERO_STAGE=1
NUM_DEVICES=2
BACKEND=nccl

cat > ds_config.json <<END
{
  "train_micro_batch_size_per_gpu": 1,
  "train_batch_size": 16,
  "gradient_clipping": 1.0,
  "zero_optimization": {"stage": $ZERO_STAGE},
  "fp16": {
    "enabled": true,
    "loss_scale": 0,
    "loss_scale_window": 500,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "initial_scale_power": 12
  },
  "steps_per_print": 2000,
  "wall_clock_breakdown": false
}
END

deepspeed --num_gpus $NUM_DEVICES pretrain_gpt.py \
    --tensor-model-parallel-size $TP_SIZE --pipeline-model-parallel-size $PP_SIZE \
    --distributed-backend $BACKEND \
    --num-layers 2 --hidden-size 64 --num-attention-heads 2 \
    --seq-length $SEQ_LENGTH --max-position-embeddings $SEQ_LENGTH \
    --micro-batch-size 1 --rampup-batch-size 2 2 1_000 --global-batch-size 16 \
    --train-samples $TRAIN_SAMPLES \
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 \
    --lr $LR --lr-warmup-samples 5 --clip-grad 1.0 --weight-decay 1e-1 \
    --vocab-file $VOCAB_FILE --merge-file $MERGE_FILE --fp16 \
    --log-interval 10 --save-interval 100 --eval-interval 100 --eval-iters 10 \
    --checkpoint-activations \
    --save $RUN --load $RUN --data-path $DATA \
    --tensorboard-dir $RUN-tensorboard --tensorboard-queue-size 5 \
    --log-timers-to-tensorboard --log-batch-size-to-tensorboard \
    --log-validation-ppl-to-tensorboard \
    --deepspeed --deepspeed_config ds_config.json --zero-stage $ZERO_STAGE \
    --deepspeed-activation-checkpointing
