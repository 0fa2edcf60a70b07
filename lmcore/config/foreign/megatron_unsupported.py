"""Further flags of Megatron-LM and its forks that are refused, by the hint for them.

The names are in lists, one hint for each list, so that no flag of a pasted command is taken for a
misspelt one.  Vendor names occur here only as parts of flags.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["EXPERTS", "FURTHER_UNSUPPORTED", "OTHER_MODELS"]

_CONVERSION = "use `lmcore checkpoint convert IN OUT --to FORMAT`, which reads every layout"
EXPERTS = "leave it out, which gives a dense model: models of experts are not supported"
_TEACHER = "leave it out: training follows the data alone, without a teacher or templates"
_RL = "leave it out: reinforcement learning is not supported"
OTHER_MODELS = "leave it out: only BERT, GPT, ICT, Llama, Retro and T5 models are trained"
_EIGHT_BITS = "use `--precision bf16`: training in 8 or 4 bits is not supported"
_REDUCED = "leave it out: gradients are reduced in fp32"
_INFERENCE = "leave it out: `lmcore generate` and `lmcore serve` have flags of their own"
_OTHER_MODEL = "leave it out, which gives another model: it is not supported"
_GATED = "use `--glu-activation geglu`"
_QUICK = "use `--glu-activation geglu`, whose GELU is exact: it gives another model"
_SKIP = "leave it out, and remove the samples when preparing the data"
_DIVIDED = "use `--sequence-parallel`, which divides activations over the tensor-parallel processes"
_TRACE = "use `--profile --profile-step-start N --profile-step-end N`"
_SHAPES = "use `--profile --profile-shapes`"
_LOGGED = "leave it out: it changes only what is measured or logged"
_FINITE = "leave it out: a non-finite loss always stops the run"
_MEMORY_HERE = "use `--recompute full` or `--recompute offload`"
_ALL_LAYERS = "leave it out: each layer processes every token"
_CHECKPOINTS = "leave it out: checkpoints are lmcore's own, and read in any layout"
_KEPT = "use `--keep-every N`"
_COMMUNICATION = "leave it out: collectives follow from the layout, and overlap where they can"
_SHARDED = "use `--zero-stage 3`"
_ZERO = "use `--zero-stage N`, 1 to 3"
_INSTANCES = "use `--zero-stage 1 --data-parallel-replicas N`"
_ZERO_BUBBLE = "use `--pipeline-schedule zero-bubble`"
_VIRTUAL = "use `--num-layers-per-virtual-pipeline-stage N`, the layers of a stage"
_EVEN = "leave it out: the layers are divided evenly"
_TIMEOUT = "use `--distributed-timeout-minutes N`"
_SCHEDULE = "leave it out: it is not supported; see `--lr-decay-style` and `--optimizer`"
_CONSTANT = "use `--lr-decay-style constant`"
_COOLDOWN = (
    "use `--lr-decay-style constant-cooldown --lr-cooldown-fraction X`, where X is its share"
)
_RESTART = "use `--override-opt-param-scheduler`, or `--finetune` to begin at step 0"
_REPLICAS = "use `--zero-stage 3 --data-parallel-replicas N`: each replica shards the weights"
_NOT_PADDED = "use `--make-vocab-size-divisible-by 1`"
_DATA_FILES = "leave it out: `--data-path` or `--data-file-list` names the data"
_TRAIN_RANGES = "use `--train-weighted-split-paths`, with the content of the file"
_VALID_RANGES = "use `--valid-weighted-split-paths`, with the content of the file"
_TEST_RANGES = "use `--test-weighted-split-paths`, with the content of the file"
_EXTRA_VALIDATION = (
    "use `--valid-weighted-split-paths 'NAME: WEIGHT START:END PREFIX, ...'`, a group for each "
    "name, with `--train-weighted-split-paths` in place of `--data-path`"
)
_OWN_DATA = "use `--train-data-path PREFIX --valid-data-path PREFIX --test-data-path PREFIX`"
_YAML = "leave it out, and write the path of a YAML file without a flag"
_FAULTS = "leave it out: a run ends at a fault, and `--continue` continues it"
_OFFLOAD = "use `--engine deepspeed --cpu-offload`"
_NOTHING = "leave it out: it has no counterpart here"


_NAMES: Mapping[str, str] = {
    _CONVERSION: """
        for-release hf-ckpt-dir hf-ckpt-num-shards input-folder load-mode loader max-queue-size
        megatron-path no-checking output-folder saver target-pp target-tp to-hf-ckpt true-vocab-size
    """,
    EXPERTS: """
        create-moe-param-group disable-moe-token-dropping disable-moe-top2-2nd-expert-sampling
        enable-expert-tensor-parallelism expert-interval expert-tensor-parallel-num-weight-shards
        expert-tensor-parallel-size gtp-expert-remat-nccl-ub
        inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type
        moe-apply-probs-on-input moe-aux-loss-coeff moe-combine-bwd-dtype moe-deepep-num-sms
        moe-dispatch-fwd-dtype moe-enable-deepep moe-enable-routing-replay moe-eval-capacity-factor
        moe-expert-capacity-factor moe-expert-parallel-size moe-expert-rank-capacity-factor
        moe-ffn-hidden-size moe-flex-dispatcher-backend moe-flex-dispatcher-num-sms moe-grouped-gemm
        moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms
        moe-hybridep-num-sms-preprocessing moe-hybridep-pad-uneven-dispatch-inputs
        moe-input-jitter-eps moe-latent-size moe-layer-freq moe-layer-recompute moe-loss-coeff
        moe-min-capacity moe-mlp-glu-interleave-size moe-ncclep-zero-copy
        moe-pad-expert-input-to-capacity moe-pad-experts-for-cuda-graph-inference moe-paged-stash
        moe-paged-stash-buffer-size-factor-cpu moe-paged-stash-buffer-size-factor-cuda
        moe-paged-stash-page-size moe-per-layer-logging moe-permute-fusion
        moe-permute-fusion-into-hybridep moe-router-bias-update-rate moe-router-dtype
        moe-router-enable-expert-bias moe-router-force-biased moe-router-force-load-balancing
        moe-router-fusion moe-router-group-topk moe-router-load-balancing-type moe-router-num-groups
        moe-router-padding-for-fp8 moe-router-padding-for-quantization moe-router-pre-softmax
        moe-router-quantile-balancing-ema moe-router-score-function moe-router-topk
        moe-router-topk-scaling-factor moe-routing-trace-capture-hidden-states
        moe-routing-trace-capture-logits moe-routing-trace-dump-weights
        moe-routing-trace-max-training-iters moe-routing-trace-path moe-shared-expert-gate
        moe-shared-expert-glu-interleave-size moe-shared-expert-intermediate-size
        moe-shared-expert-overlap moe-single-grouped-bias moe-single-grouped-weight
        moe-token-dispatcher-type moe-token-drop-policy moe-train-capacity-factor
        moe-upcycling-granularity moe-use-grouped-tensor moe-use-upcycling moe-z-loss-coeff mos
        num-experts num-experts-switch num-experts-teacher
        overlap-dispatch-backward-with-experts-wgrad overlap-moe-expert-parallel-comm
        rl-inference-expert-model-parallel-size rl-inference-expert-tensor-model-parallel-size
        save-tokens-per-expert-interval topk use-grouped-gemm-for-shared-expert use-tutel
    """,
    _TEACHER: """
        dino-teacher-temp dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs
        hidden-size-teacher kd kd-alpha-ce kd-beta-ce kd-temp load-teacher
        num-attention-heads-teacher num-layers-teacher sft sft-tokenizer-prompt-format
    """,
    _RL: """
        grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-entropy-term-weight
        grpo-filter-groups-with-same-reward grpo-group-size grpo-iterations grpo-kl-beta
        grpo-prompts-per-step langrl-env-config perform-rl-step refit-method
        result-rejected-tracker-filename rl-consumption-granularity rl-default-temperature
        rl-default-top-k rl-default-top-p rl-durable-rollout-bank rl-generation-lag
        rl-importance-sampling-truncation-coef rl-inference-logprobs-is-correction
        rl-inference-model-unified-memory-level rl-inference-parsers
        rl-inference-pipeline-model-parallel-size rl-inference-tensor-model-parallel-size
        rl-kv-cache-management-mode rl-max-inflight-requests
        rl-offload-inference-model-weights-when-idle rl-offload-optimizer-during-inference
        rl-partial-rollouts rl-persist-cuda-graphs rl-profile rl-profile-dir rl-prompts-per-eval
        rl-rollout-bank-dir rl-rollout-bank-max-bytes rl-sequence-packing-algo
        rl-sequence-packing-max-sequences-per-bin rl-skip-bos-token rl-submission-granularity
        rl-training-cuda-graphs rl-use-sequence-packing rl-verify-model-weights-swap
    """,
    OTHER_MODELS: """
        classes-fraction data-per-class-fraction dino-bottleneck-size dino-freeze-last-layer
        dino-head-hidden-size dino-local-crops-number dino-local-img-size dino-norm-last-layer
        faiss-match faiss-topk-retrievals faiss-use-gpu head-lr-mult img-dim iter-per-epoch
        loss-on-targets-only mask-factor mask-type no-data-sharding qa-data-dev qa-data-test
        train-hard-neg train-with-neg val-av-rank-hard-neg val-av-rank-other-neg
    """,
    _EIGHT_BITS: """
        fp4-format fp4-param-gather fp4-quantizer-factory fp4-recipe fp8-amax-compute-algo
        fp8-amax-history-len fp8-e4m3 fp8-format fp8-hybrid fp8-interval fp8-margin fp8-output-proj
        fp8-param-gather fp8-quantizer-factory fp8-recipe keep-fp8-transpose-cache
        kitchen-config-file kitchen-recipe-number no-fp8-wgrad num-layers-at-end-in-bf16
        num-layers-at-start-in-bf16 reuse-grad-buf-for-mxfp8-param-ag te-precision-config-file
    """,
    _REDUCED: """
        grad-reduce-in-bf16
    """,
    _INFERENCE: """
        chat-template decode-only-cuda-graphs ds-inference enable-chunked-prefill flash-decode
        inference inference-batch-times-seqlen-threshold inference-coordinator-port
        inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens inference-cuda-graph-scope
        inference-disable-ep-consensus inference-disable-triton-nvls-kernels
        inference-dynamic-batching inference-dynamic-batching-async-sched-mode
        inference-dynamic-batching-block-size inference-dynamic-batching-buffer-size-gb
        inference-dynamic-batching-cuda-graph-mixed-prefill-count
        inference-dynamic-batching-cuda-graph-sizing-distribution
        inference-dynamic-batching-logprobs-mode inference-dynamic-batching-mamba-memory-ratio
        inference-dynamic-batching-max-requests inference-dynamic-batching-max-tokens
        inference-dynamic-batching-num-cuda-graphs inference-dynamic-batching-paused-buffer-size-gb
        inference-dynamic-batching-prefix-caching
        inference-dynamic-batching-prefix-caching-coordinator-policy
        inference-dynamic-batching-prefix-caching-eviction-policy
        inference-dynamic-batching-prefix-caching-mamba-gb
        inference-dynamic-batching-prefix-caching-routing-alpha
        inference-dynamic-batching-sampling-backend
        inference-dynamic-batching-track-generated-token-events
        inference-dynamic-batching-track-paused-request-events
        inference-dynamic-batching-unified-memory-level inference-fuse-tp-communication
        inference-grouped-gemm-backend inference-logging-step-interval inference-max-requests
        inference-max-seq-length inference-rng-tracker inference-shards
        inference-text-gen-server-logging inference-use-synchronous-zmq-collectives
        inference-wandb-logging mlp-chunks-for-prefill num-speculative-tokens
        use-legacy-static-engine
    """,
    _OTHER_MODEL: """
        activation-func-clamp-value adjust-word-embedding-init apply-query-key-layer-scaling
        apply-residual-connection-post-layernorm apply-wd-to-qk-layernorm attention-output-gate
        cache-mla-latents disable-mamba-mem-eff-path dsa-indexer-head-dim dsa-indexer-k-norm-epsilon
        dsa-indexer-k-norm-fp32 dsa-indexer-loss-coeff dsa-indexer-n-heads
        dsa-indexer-rope-interleaved dsa-indexer-skip-topk-offset dsa-indexer-topk
        dsa-indexer-topk-freq dsa-indexer-use-sparse-loss dsa-kernel-backend
        embedding-init-method-std enable-mhc-connections experimental-attention-variant fim-data
        fim-eod-token fim-fragment-rate fim-middle-token fim-no-prefix fim-pad-token
        fim-prefix-token fim-rate fim-split-sample fim-spm-rate fim-suffix-token freeze-all-layers
        fused-residual-rmsnorm gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute
        gdp-num-householder glu-linear-offset heterogeneous-layers-config-encoded-json
        heterogeneous-layers-config-path hybrid-context-parallel hybrid-layer-pattern
        hybrid-override-pattern is-hybrid-model kv-lora-rank linear-attention-freq
        linear-conv-kernel-dim linear-key-head-dim linear-num-key-heads linear-num-value-heads
        linear-value-head-dim logits-load-decode-threads logits-load-dir logits-load-ignore-errors
        logits-load-kd-loss-alpha logits-load-msc-prefetch-depth logits-load-prefetch-factor
        logits-save-dir logits-save-dtype logits-save-top-k logits-save-top-p
        logits-save-top-p-min-k mamba-head-dim mamba-inference-conv-states-dtype
        mamba-inference-ssm-states-dtype mamba-num-groups mamba-num-heads mamba-state-dim
        mamba-training-ssm-states-dtype mhc-init-gating-factor mhc-num-residual-streams
        mhc-recompute-layer-num mhc-sinkhorn-iterations mla-down-proj-fusion mlp-type mrope-section
        mscale mscale-all-dim mtp-detach-heads mtp-hsm mtp-hybrid-override-pattern
        mtp-loss-scaling-factor mtp-num-layers mtp-standalone mtp-use-repeated-layer
        multi-latent-attention mup-attn-scale-power mup-base-head-dim mup-base-hidden-size
        mup-embedding-mult mup-output-mult mup-width-mult no-dsa-indexer-rotate-activation
        no-dsa-indexer-scoring-relu no-rope-freq no-yarn-correction-range-round-to-int openai-gelu
        q-lora-rank qk-clip qk-clip-alpha qk-clip-threshold qk-head-dim qk-l2-norm qk-layernorm
        qk-pos-emb-head-dim rope-type
        rotary-scaling-factor scattered-embeddings softmax-type spec use-fused-weighted-squared-relu
        use-mup use-te-activation-func v-head-dim window-attn-skip-freq window-size
        word-embedding-init-std yarn-beta-fast yarn-beta-slow yarn-correction-range-round-to-int
        yarn-original-max-position-embeddings
    """,
    _GATED: """
        geglu
    """,
    _QUICK: """
        quick-geglu
    """,
    _SKIP: """
        iterations-to-skip skip-train-iteration-range train-iters-to-skip train-range-to-skip
    """,
    _DIVIDED: """
        distribute-checkpointed-activations distribute-saved-activations partition-activations
    """,
    _TRACE: """
        profile-backward profile-steps
    """,
    _SHAPES: """
        record-shapes
    """,
    _LOGGED: """
        app-tag-run-name app-tag-run-version check-for-large-grads check-for-spiky-loss
        disable-straggler-on-startup dump-param-to-param-group-map
        log-device-memory-used log-energy log-level log-level-replica log-max-attention-logit
        log-memory-interval log-path log-progress log-straggler log-world-size-to-tensorboard
        no-barrier-with-level-1-timing
        no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard no-one-logger
        one-logger-async one-logger-project one-logger-run-name otel-enabled otel-service-name
        otel-span-groups straggler-ctrlr-port straggler-minmax-count timing-log-option
    """,
    _FINITE: """
        no-check-for-nan-in-loss-and-grad
    """,
    _MEMORY_HERE: """
        activation-offload-fraction checkpoint-in-cpu contigious-checkpointing
        cpu-offloading-num-layers cpu-offloading-retain-pinned-cpu-buffers
        delay-offload-until-cuda-graph delta-offload-bytes-across-pp-ranks
        fine-grained-activation-offloading fine-grained-offloading-max-inflight-offloads
        gtp-remat-opt-in-modules gtp-remat-reduce-scatter-with-fp32-accumulation offload-modules
        recompute-modules synchronize-each-layer
    """,
    _ALL_LAYERS: """
        random-ltd
    """,
    _CHECKPOINTS: """
        async-ckpt-cpu-priority async-ckpt-io-priority async-ckpt-use-cpu-shm async-strategy
        ckpt-assume-constant-structure ckpt-convert-format ckpt-convert-save
        ckpt-convert-update-legacy-dist-opt-format ckpt-drop-redundant-extra-state
        ckpt-fully-parallel-load ckpt-fully-parallel-load-exchange-algo
        ckpt-fully-parallel-load-per-rank-objects ckpt-fully-parallel-load-process-group
        ckpt-fully-parallel-save ckpt-fully-parallel-save-process-group ckpt-pg-tensors-cache-create
        ckpt-pg-tensors-cache-path dist-ckpt-format dist-ckpt-optim-fully-reshardable
        dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness dist-ckpt-workers
        load-main-params-from-ckpt no-ckpt-fully-parallel-save
        no-ckpt-load-validate-sharding-integrity no-use-tokenizer-model-from-checkpoint-args
        non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo
        non-persistent-local-ckpt-dir non-persistent-save-interval override-ckpt-iteration
        replication replication-factor replication-jump save-activations-interval
        save-dgrads-interval save-params-interval save-wgrads-interval use-dist-ckpt
        use-mp-args-from-checkpoint-args use-persistent-ckpt-worker
    """,
    _KEPT: """
        save-retain-interval
    """,
    _COMMUNICATION: """
        cp-comm-type ddp-average-in-collective ddp-bucket-size ddp-num-buckets
        ddp-pad-buckets-for-high-nccl-busbw ddp-param-name-patterns-for-fp32-local-accumulation
        ddp-reduce-scatter-with-fp32-accumulation disable-gloo-process-groups
        disable-symmetric-registration enable-full-sharding-in-hsdp
        ep-overlap-early-attn-memory-release fake-process-group flight-recorder-dump-path
        flight-recorder-include-stack-trace flight-recorder-trace-buffer-size
        fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer fsdp-manual-registration
        gtp-remat-nccl-ub high-priority-a2a-comm-stream
        megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-grad-comm-dtype
        megatron-fsdp-main-grads-dtype megatron-fsdp-main-params-dtype
        megatron-fsdp-max-pool-double-buffer megatron-fsdp-version
        microbatch-group-size-per-virtual-pipeline-stage nccl-all-reduce-for-prefill
        nccl-communicator-config-path no-align-grad-reduce no-align-param-gather
        no-flight-recorder-dump-on-timeout no-flight-recorder-extra-dump-on-exec
        no-flight-recorder-include-only-active
        no-strict-fsdp-dtensor-load no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad
        no-tp-comm-overlap-ag no-tp-comm-overlap-rs no-tp-comm-split-ag no-tp-comm-split-rs
        outer-dp-sharding-strategy overlapping-eval
        pipeline-model-parallel-comm-backend sharp-enabled-group suggested-communication-unit-size
        symmetric-ar-type torch-fsdp2-no-reshard-after-forward tp-comm-bootstrap-backend
        use-nccl-ub use-ring-exchange-p2p use-sharp
    """,
    _SHARDED: """
        use-megatron-fsdp use-torch-fsdp2
    """,
    _ZERO: """
        data-parallel-sharding-strategy
    """,
    _INSTANCES: """
        num-distributed-optimizer-instances
    """,
    _ZERO_BUBBLE: """
        enable-zbh1-pipeline
    """,
    _VIRTUAL: """
        num-virtual-stages-per-pipeline-rank
    """,
    _EVEN: """
        account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
        decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
        pipeline-model-parallel-layout pp-partition-method
    """,
    _TIMEOUT: """
        distributed-timeout-seconds-after-init
    """,
    _SCHEDULE: """
        decoupled-lr decoupled-min-lr lion-beta1 lion-beta2 lr-finder lr-warmup-init
        muon-coefficient-type muon-scalar-optimizer muon-use-syrk muonclip-alpha muonclip-t
        no-weight-decay-cond-type weight-decay-incr-style
    """,
    _CONSTANT: """
        constant-lr
    """,
    _COOLDOWN: """
        lr-constant-fraction lr-constant-plus-cooldown lr-constant-plus-cooldown-frac
        lr-constant-tokens lr-cooldown-tokens lr-wsd-decay-iters lr-wsd-decay-samples
        lr-wsd-decay-style
    """,
    _RESTART: """
        no-load-lr-state reset-iteration
    """,
    _REPLICAS: """
        use-mics
    """,
    _NOT_PADDED: """
        no-pad-vocab-size
    """,
    _DATA_FILES: """
        aml-data-download-path data-args-path dataloader-defer-npy-index-mmap
        dataloader-fast-cache-load dataloader-inter-document-masking mid-level-dataset-surplus
        multiple-validation-sets no-create-attention-mask-in-dataloader no-mmap-bin-files
        num-dataset-builder-threads object-storage-cache-path per-dataset-sequences-path
        phase-transition-iterations repeated-dataloader return-data-index
        train-data-exact-num-epochs train-desc-path train-doc-idx-path train-idx-path
        train-sample-idx-path train-shuffle-idx-path use-dataset-only
        use-same-sampling-seed-across-dp-ranks
    """,
    _TRAIN_RANGES: """
        train-weighted-split-paths-path
    """,
    _VALID_RANGES: """
        valid-weighted-split-paths-path
    """,
    _TEST_RANGES: """
        test-weighted-split-paths-path
    """,
    _EXTRA_VALIDATION: """
        extra-eval-data-path
    """,
    _OWN_DATA: """
        per-split-data-args-path
    """,
    _YAML: """
        yaml-cfg
    """,
    _FAULTS: """
        adlr-autoresume adlr-autoresume-interval calc-ft-timeouts enable-ft-package
        error-injection-rate error-injection-type ft-num-warmup-iters gpu-sniff-test-interval
        inprocess-active-world-size inprocess-barrier-timeout inprocess-completion-timeout
        inprocess-empty-cuda-cache inprocess-granularity inprocess-hard-timeout
        inprocess-heartbeat-interval inprocess-heartbeat-timeout inprocess-last-call-wait
        inprocess-max-iterations inprocess-monitor-process-interval
        inprocess-monitor-thread-interval inprocess-progress-watchdog-interval inprocess-restart
        inprocess-soft-timeout inprocess-termination-grace-time rerun-mode
        run-workload-inspector-server test-mode
    """,
    _OFFLOAD: """
        min-offloaded-tensor-size no-pin-cpu-grads no-pin-cpu-params optimizer-cpu-offload
        optimizer-offload-fraction remote-device use-torch-optimizer-for-cpu-offload
    """,
    _NOTHING: """
        abort-on-unmet-fused-kernel-constraints allow-ambiguous-pad-tokens batch-invariant-backend
        batch-invariant-mode config-logger-dir create-all-gather-group cross-entropy-fusion-impl
        cross-entropy-loss-fusion cuda-graph-modules data-efficiency-curriculum-learning
        data-parallel-random-init defer-embedding-wgrad-compute delay-wgrad-compute
        disable-bf16-reduced-precision-matmul disable-jit-fuser disable-mem-efficient-ln disable-msc
        distrib-optim-fully-reshardable-mem-efficient empty-unused-memory-level enable-experimental
        enable-msc enable-zbh1-exact-semantics eval-global-batch-size eval-micro-batch-size
        exp-avg-dtype exp-avg-sq-dtype first-last-layers-bf16 flash-attention-version
        force-ds-sequence-parallel full-validation hierarchical-context-parallel-sizes
        high-priority-stream-groups init-model-with-meta-device kitchen-attention-backend
        lazy-mpu-init logging-level main-grads-dtype main-params-dtype max-seqlen-per-dp-cp-rank
        max-tokens-to-oom memory-centric-tiled-linear mlp-chunks-for-training
        multiprocessing-context no-clone-scatter-output-in-embedding no-gradient-reduce-div-fusion
        no-initialization no-save-tokenizer-assets
        no-tokenizer-sentencepiece-ignore-extra-whitespaces no-use-layer-wise-param-layout
        null-tokenizer-eod-id null-tokenizer-pad-id onnx-safe optimizer-cuda-graph
        output-logit-dtype pytorch-profiler-collect-chakra reweight-loss-based-on-position-frequency
        sample-rate split-transformers standalone-embedding-stage start-eval-at-iter
        sync-tp-duplicated-parameters te-rng-tracker tensor-parallel-num-weight-shards tile-factor
        timescale tokenizer-hf-no-use-fast tokenizer-metadata trace-dir train-sync-interval
        use-bnb-optimizer use-gigatoken use-grouped-gemm-for-dense-mlp use-kitchen-attention
        use-pin-memory use-precision-aware-optimizer use-tp-pp-dp-mapping
        use-transformer-engine-op-fuser valid-num-workers validation-set-names verify-integrity
        wgrad-deferral-limit
    """,
}

FURTHER_UNSUPPORTED: Mapping[str, str] = {
    f"--{name}": hint for hint, names in _NAMES.items() for name in names.split()
}
"""Hint for each flag."""
