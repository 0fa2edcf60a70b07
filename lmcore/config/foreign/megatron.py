"""Megatron's flags, in three tables by their treatment here, so that Megatron commands work.

`RENAMED` flags are translated, `FIXED` flags are accepted without effect, `UNSUPPORTED` flags are
refused with a hint; `lmcore.config.foreign.megatron_flags` does it.  A flag that is an option here
by the same name is in none of them.  The flags come from old and new Megatron-LM, its DeepSpeed
forks, and their tools.  Vendor names occur here only as parts of flags and their values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lmcore.config.foreign.megatron_unsupported import EXPERTS, FURTHER_UNSUPPORTED, OTHER_MODELS

__all__ = [
    "ENGINE_FLAG",
    "FIXED",
    "MERGE_FIXED",
    "OF_ANOTHER_PROGRAM",
    "PREPARE_FIXED",
    "PREPARE_RENAMED",
    "PREPARE_UNSUPPORTED",
    "RENAMED",
    "SWITCHES",
    "UNSUPPORTED",
    "VALUES_OF_ANOTHER_PROGRAM",
    "Fixed",
    "Renamed",
]

ENGINE_FLAG = "--deepspeed"
"""Flag with which Megatron's forks choose their engine."""


@dataclass(frozen=True)
class Renamed:
    """A flag with another name here.

    Attributes:
        replacement: Flag of lmcore, with its value if that is fixed: "--precision bf16".
        only: Values that have an equivalent; None: every value is passed on.
        hint: Hint for any other value.
        whole: True if `replacement` needs no further value; None: if it contains one.
        yields: True if the option's own flag counts if both are given.
    """

    replacement: str
    only: tuple[str, ...] | None = None
    hint: str = ""
    whole: bool | None = None
    yields: bool = False


@dataclass(frozen=True)
class Fixed:
    """A flag that is accepted without effect.

    Attributes:
        note: Behavior of lmcore with or without the flag.
        only: Values that are accepted; None: every value; (): the flag takes none.
        hint: Hint for any other value.
    """

    note: str
    only: tuple[str, ...] | None = ()
    hint: str = ""


_INDEX = (
    "use `lmcore index build CHECKPOINT --data-path PREFIX --output DIR`, and `lmcore index search`"
)

_TOKENIZER_RENAMED = {"--tokenizer-hf-include-special-tokens": Renamed("--add-special-tokens")}
_TOKENIZER_FIXED = {
    "--tokenizer-hf-use-fast": Fixed("every `tokenizer.json` is read by the fast implementation"),
    "--tokenizer-hf-no-include-special-tokens": Fixed(
        "special tokens are added with `--add-special-tokens` only"
    ),
    "--tokenizer-sentencepiece-legacy": Fixed("special tokens follow the pieces of the model"),
}

RENAMED: Mapping[str, Renamed] = {
    "--batch-size": Renamed("--micro-batch-size"),
    "--cache-dir": Renamed("--data-cache-path", yields=True),
    "--model-parallel-size": Renamed("--tensor-model-parallel-size"),
    "--warmup": Renamed("--lr-warmup-fraction"),
    "--kill-switch-file": Renamed("--kill-switch-path"),
    "--padded-vocab-size": Renamed("--pad-vocab-size-to"),
    "--vocab": Renamed("--vocab-file"),
    **_TOKENIZER_RENAMED,
    "--bert-no-binary-head": Renamed("--no-bert-binary-head", whole=True),
    "--encoder-num-layers": Renamed("--num-layers"),
    "--encoder-seq-length": Renamed("--seq-length"),
    "--ict-head-size": Renamed("--biencoder-projection-dim"),
    "--retro-add-retriever": Renamed("--model-family retro"),
    "--retro-workdir": Renamed("--retro-project-dir"),
    "--retro-gpt-chunk-length": Renamed("--retro-chunk-length"),
    **{
        f"--retro-gpt-{name}": Renamed(f"--{name}")  # of Retro's preprocessing
        for name in (
            *("data-path", "data-cache-path", "split", "seed", "seq-length", "train-samples"),
            *("eval-interval", "eval-iters", "global-batch-size", "tokenizer-type"),
            *("tokenizer-model", "vocab-file", "merge-file"),
        )
    },
    "--retro-no-verify-neighbor-count": Renamed("--no-retro-verify-neighbor-count", whole=True),
    "--deterministic-mode": Renamed("--deterministic", whole=True),
    "--fine-tune": Renamed("--finetune"),
    "--ict-load": Renamed("--finetune --load", whole=False),
    "--load-tag": Renamed("--ckpt-step"),
    ENGINE_FLAG: Renamed("--engine deepspeed", yields=True),
    "--cpu-optimizer": Renamed("--cpu-offload"),
    "--num-gpus": Renamed("--nproc-per-node"),
    "--ds-sequence-parallel-size": Renamed("--context-parallel-size"),
    "--override-lr-scheduler": Renamed("--override-opt-param-scheduler"),
    "--use-checkpoint-lr-scheduler": Renamed("--use-checkpoint-opt-param-scheduler"),
    "--use-checkpoint-opt-params-scheduler": Renamed("--use-checkpoint-opt-param-scheduler"),
    "--check-weight-hash-across-dp-replicas-interval": Renamed("--check-replicas-interval"),
    "--enable-cuda-graph": Renamed("--step-graph", whole=True),
    "--bf16": Renamed("--precision bf16"),
    "--fp16": Renamed("--precision fp16"),
    "--norm-epsilon": Renamed("--layernorm-epsilon"),
    "--use-rotary-position-embeddings": Renamed("--position-embedding-type rope"),
    "--max-absolute-position-embeddings": Renamed("--max-position-embeddings"),
    # Scripts add it to `--use-rotary-position-embeddings`: it turns off the learned ones alone.
    "--no-position-embedding": Renamed("--position-embedding-type none", yields=True),
    "--rope-theta": Renamed("--rotary-base"),
    "--rotary-position-embeddings-theta": Renamed("--rotary-base"),
    "--disable-bias-linear": Renamed("--no-add-bias-linear"),
    "--num-key-value-heads": Renamed("--group-query-attention --num-query-groups", whole=False),
    "--checkpoint-activations": Renamed("--recompute full"),
    "--recompute-activations": Renamed("--recompute selective"),
    "--recompute-granularity": Renamed("--recompute"),
    "--activations-checkpoint-method": Renamed("--recompute full --recompute-method", whole=False),
    "--activations-checkpoint-num-layers": Renamed("--recompute-num-layers"),
    "--checkpoint-num-layers": Renamed("--recompute-num-layers"),
    "--pytorch-profiler-collect-shapes": Renamed("--profile-shapes"),
    "--pytorch-profiler-collect-callstack": Renamed("--profile-stacks"),
    "--muon-use-nesterov": Renamed("--muon-nesterov"),
    "--muon-ns-steps": Renamed("--muon-num-ns-steps"),
    "--muonadamw-beta1": Renamed("--adam-beta1"),
    "--muonadamw-beta2": Renamed("--adam-beta2"),
    "--muonadamw-eps": Renamed("--adam-eps"),
    "--dshampooadamw-eps": Renamed("--shampoo-eps"),
    "--dshampooadamw-max-preconditioner-dim": Renamed("--shampoo-max-preconditioner-dim"),
    "--dshampooadamw-precondition-freq": Renamed("--shampoo-precondition-frequency"),
}

# They take no value.
SWITCHES = {
    "--add-special-tokens",
    "--cpu-offload",
    "--finetune",
    "--muon-nesterov",
    "--override-opt-param-scheduler",
    "--no-add-bias-linear",
    "--profile-shapes",
    "--profile-stacks",
    "--use-checkpoint-opt-param-scheduler",
}

_PROFILER = Fixed("`--profile` uses torch's profiler, with labels for the parts of a step")
_KERNELS = Fixed("each op uses the device's kernel of highest priority; `--ops` selects another")
_EVERY_CHUNK = "leave it out: an index has every chunk, and reads them shard by shard"
_BUCKETS = Fixed("gradients are reduced in buckets, which the engine sets")
_EVENTS = Fixed("TensorBoard records the metrics of metrics.jsonl")
_SIGNALS = Fixed("SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 save a checkpoint and exit")
_NATIVE = "with `--engine native`, not with DeepSpeed"

_FORMAT = Fixed(
    "the format is detected; every format is memory-mapped",
    ("infer", "mmap", "cached", "lazy"),
    "leave it out, and prepare the data again with `lmcore data prepare`",
)

FIXED: Mapping[str, Fixed] = {
    "--expert-model-parallel-size": Fixed("the model has no experts", ("1",), EXPERTS),
    "--DDP-impl": Fixed(
        "gradients are all-reduced over the processes", ("local", "torch"), "use `--zero-stage 3`"
    ),
    "--retro-index-type": Fixed("chunks are added in order", ("faiss-base", "faiss-par-add")),
    "--retro-index-train-load-fraction": Fixed("all are loaded", ("1", "1.0"), _EVERY_CHUNK),
    "--retro-index-add-load-fraction": Fixed("every chunk is added", ("1", "1.0"), _EVERY_CHUNK),
    "--retro-index-no-delete-training-embeddings": Fixed("vectors are kept"),
    "--retro-index-no-delete-added-codes": Fixed("vectors are kept"),
    "--local-rank": Fixed("the rank is read from the environment", None),
    "--no-async-tensor-model-parallel-allreduce": Fixed(
        "tensor-parallel all-reduces are synchronous"
    ),
    "--no-pipeline-parallel": Fixed("`--pipeline-model-parallel-size` alone divides the layers"),
    "--no-scatter-gather-tensors-in-pipeline": Fixed("stages exchange what the layout divides"),
    "--no-contiguous-buffers-in-local-ddp": _BUCKETS,
    "--use-contiguous-buffers-in-ddp": _BUCKETS,
    "--zero-allgather-bucket-size": Fixed(_BUCKETS.note, None),
    "--zero-reduce-bucket-size": Fixed(_BUCKETS.note, None),
    "--zero-reduce-scatter": _BUCKETS,
    "--zero-contigious-gradients": _BUCKETS,
    "--overlap-grad-reduce": Fixed("gradient reduction overlaps with backward"),
    **dict.fromkeys(
        (
            *("--overlap-param-gather", "--overlap-param-gather-with-optimizer-step"),
            *("--overlap-p2p-communication", "--no-overlap-p2p-communication"),
            *("--overlap-p2p-communication-warmup-flush", "--overlap-cpu-optimizer-d2h-h2d"),
            *("--tp-comm-overlap", "--tp-comm-overlap-rs-dgrad"),
        ),
        Fixed("collectives follow from the layout, and overlap where they can"),
    ),
    "--tp-comm-overlap-cfg": Fixed("collectives overlap where they can", None),
    "--accumulate-allreduce-grads-in-fp32": Fixed(
        "gradients are accumulated and all-reduced in fp32"
    ),
    "--fp32-residual-connection": Fixed(f"the residual stream is fp32 {_NATIVE}"),
    "--embedding-weights-in-fp32": Fixed(f"weights are fp32 under bf16 and fp16 {_NATIVE}"),
    "--attention-softmax-in-fp32": Fixed("softmax is computed in fp32"),
    "--no-query-key-layer-scaling": Fixed("attention scores are always scaled by 1/sqrt(head_dim)"),
    "--use-cpu-initialization": Fixed("initial weights do not depend on the device"),
    "--use-flash-attn": _KERNELS,
    "--use-flash-attn-v1": _KERNELS,
    "--use-flash-attn-v2": _KERNELS,
    "--use-flash-attn-triton": _KERNELS,
    "--use-flash-attn-builder": _KERNELS,
    "--attention-backend": Fixed(_KERNELS.note, None),
    "--transformer-impl": Fixed(_KERNELS.note, None),
    "--no-bias-gelu-fusion": _KERNELS,
    "--no-persist-layer-norm": _KERNELS,
    "--no-bias-swiglu-fusion": _KERNELS,
    "--no-rope-fusion": _KERNELS,
    "--no-bias-dropout-fusion": _KERNELS,
    "--no-masked-softmax-fusion": _KERNELS,
    "--no-gradient-accumulation-fusion": _KERNELS,
    "--use-mcore-models": Fixed("there is one transformer"),
    "--cpu-torch-adam": Fixed("the optimizer runs in torch, also with its state in host memory"),
    "--ds-fused-adam": Fixed("the optimizer uses the device's kernel"),
    "--deepspeed-activation-checkpointing": Fixed("`--recompute` selects the recompute policy"),
    "--dataset-impl": _FORMAT,
    "--data-impl": _FORMAT,
    "--mmap-warmup": Fixed("data is memory-mapped"),
    "--resume-dataloader": Fixed("a resumed run continues with the next sample"),
    "--num-workers": Fixed(
        "batches are read from memory-mapped files; `--num-prefetch` sets the prefetch depth", None
    ),
    **_TOKENIZER_FIXED,
    "--exit-signal-handler": _SIGNALS,
    "--exit-signal-handler-for-training": _SIGNALS,
    "--exit-signal-handler-for-dataloader": Fixed("a thread of each process reads the batches"),
    "--exit-signal": Fixed(
        _SIGNALS.note,
        ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"),
        "leave it out, and send SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2",
    ),
    "--ckpt-format": Fixed(
        "checkpoints have torch's distributed format",
        ("torch_dist",),
        "leave it out: checkpoints are lmcore's own, and read in any layout",
    ),
    "--auto-detect-ckpt-format": Fixed("a checkpoint's format is read from its manifest"),
    "--check-for-nan-in-loss-and-grad": Fixed("a non-finite loss stops the run"),
    "--log-throughput": Fixed("the progress line shows tokens/s and MFU"),
    "--log-timers-to-tensorboard": Fixed(
        "TensorBoard records step time and data wait; `--profile` times the parts of a step"
    ),
    "--log-optimizer-states-to-tensorboard": Fixed("optimizer states are not recorded"),
    "--log-batch-size-to-tensorboard": _EVENTS,
    "--log-learning-rate-to-tensorboard": _EVENTS,
    "--log-validation-ppl-to-tensorboard": _EVENTS,
    "--log-loss-scale-to-tensorboard": _EVENTS,
    "--muon-scale-mode": Fixed(
        "updates are scaled to the size of AdamW's: `spectral` with the factor 0.2",
        ("spectral",),
        "leave it out: updates are scaled to the size of AdamW's",
    ),
    "--muon-extra-scale-factor": Fixed(
        "updates are scaled to the size of AdamW's",
        ("0.2",),
        "leave it out, and scale `--lr`: the factor is 0.2",
    ),
    "--muon-no-split-qkv": Fixed("queries, keys and values are one matrix"),
    "--muon-fp32-matmul-prec": Fixed("Newton-Schulz iterations run in bfloat16", None),
    "--schedulefree-for-each": Fixed("all weights are updated together"),
    "--dshampooadamw-use-decoupled-weight-decay": Fixed(
        "weight decay is decoupled", ("True", "true"), "leave it out: weight decay is decoupled"
    ),
    "--use-pytorch-profiler": _PROFILER,
    "--nvtx-ranges": _PROFILER,
    "--no-manual-gc-eval": Fixed("garbage collection runs only between steps"),
    "--timing-log-level": Fixed("step times are always recorded", None),
}

_PREPARE = "leave it out of this command: it belongs to `lmcore data prepare`"
_GENERATE = "leave it out of this command: it belongs to `lmcore generate`"
_LAUNCHER = "leave it out of this command: it belongs to the launcher"
_EVALUATION = (
    "use `lmcore evaluate CHECKPOINT --task NAME`, such as `wikitext103` or `lambada_strict` "
    "(docs/how-to/evaluate.md)"
)
_ENGINE = "use `--engine deepspeed`"
_ENGINE_FILE = "use `--engine deepspeed --deepspeed-config FILE`"
_CONVERSION = (
    "use `--load DIR`, which takes a checkpoint of any layout, also of Megatron and DeepSpeed, or "
    "`lmcore checkpoint convert IN OUT --to FORMAT`, which writes theirs"
)
_RAW_TEXT = "use `lmcore data prepare --json-keys KEY`, then `--data-path PREFIX`"
_MEMORY = "use `--profile --profile-memory`, which records allocations in the trace"
_TIKTOKEN = "leave it out, and convert the vocabulary to a `tokenizer.json` for `HFTokenizer`"
_GRAPH = "use `--step-graph`, which captures forward and backward of a micro-batch"
_IN_CORPUS = "leave it out: files are blended by weight, and the samples of each are shuffled"
_TOKENIZER_UNSUPPORTED = {
    "--trust-remote-code": "leave it out: a `tokenizer.json` is read, no code of a tokenizer run",
    "--tokenizer-special-tokens": "use `--vocab-extra-ids N`, or add them to the tokenizer's files",
    "--tiktoken-pattern": _TIKTOKEN,
    "--tiktoken-num-special-tokens": _TIKTOKEN,
}


OF_ANOTHER_PROGRAM = {
    "--task": "`lmcore evaluate CHECKPOINT --task mnli --finetune` trains a head for MNLI, QQP or "
    "RACE and scores it (docs/how-to/evaluate.md), and `--task classification` or `--task "
    "multiple-choice` trains one on other data; for the others " + _EVALUATION
}
"""Flags that show by a value that a command is no training: its other flags mean other things.
Each has a hint."""

VALUES_OF_ANOTHER_PROGRAM: Mapping[str, Collection[str]] = {
    "--task": (
        *("LAMBADA", "WIKITEXT103", "MNLI", "QQP", "RACE"),
        *("ICT-ZEROSHOT-NQ", "RETRIEVER-EVAL", "RET-FINETUNE-NQ"),
    )
}
"""Values of Megatron's flags that an option here has the name of, with other values.  Source:
`tasks/main.py` of Megatron-LM."""


def _all(hint: str, *flags: str) -> dict[str, str]:
    return dict.fromkeys(flags, hint)


UNSUPPORTED: Mapping[str, str] = {
    **_all(_GRAPH, "--cuda-graph-impl", "--external-cuda-graph"),
    **_all(_GRAPH, "--cuda-graph-scope", "--cuda-graph-warmup-steps"),
    **_all(_IN_CORPUS, "--shuffle-sample-in-corpus", "--blend-sample-in-corpus"),
    **FURTHER_UNSUPPORTED,
    **_all("leave it out: the loss is computed in fp32", "--fp16-lm-cross-entropy"),
    **_all(_ENGINE, "--deepscale", "--deepspeed-mpi"),
    **_all(_ENGINE_FILE, "--deepscale-config"),
    **_all("use `--global-batch-size N`", "--num-microbatches-in-minibatch"),
    **_all(
        "leave it out, and use a batch size that is divisible", "--decrease-batch-size-if-needed"
    ),
    **_all("leave it out: rotary embeddings pair channel i with i + half", "--rotary-interleaved"),
    **_all(
        "use `--use-rope-scaling`, which scales as Llama 3.1 does",
        "--rotary-seq-len-interpolation-factor",
    ),
    **_all(OTHER_MODELS, "--apply-layernorm-1p", "--squared-relu"),
    **_all(_INDEX, "--block-data-path", "--embedding-path", "--evidence-data-path"),
    **_all(_INDEX, "--indexer-batch-size", "--indexer-log-interval", "--retriever-seq-length"),
    **_all("use `--model-family NAME`, which takes the same names", "--model-type"),
    **_all(
        "leave it out: the accuracies of the first 1, 5, 20 and 100 blocks are reported",
        "--retriever-report-topk-accuracies",
    ),
    **_all(OTHER_MODELS, "--bert-embedder-type", "--output-bert-embeddings"),
    **_all(OTHER_MODELS, "--noise-density", "--mean-noise-span-length"),
    **_all(
        "leave it out: samples have the tokens of their neighbours, and no numbers of documents",
        "--retro-return-doc-ids",
    ),
    **_all(OTHER_MODELS, "--vision-pretraining", "--vision-pretraining-type"),
    **_all(OTHER_MODELS, "--vision-backbone-type", "--swin-backbone-type", "--num-classes"),
    **_all(OTHER_MODELS, "--img-h", "--img-w", "--num-channels", "--patch-dim"),
    **_all("use `--init-method-std X`", "--init-method-xavier-uniform"),
    **_all(_MEMORY, "--record-memory-history", "--memory-snapshot-path"),
    **_all("leave it out: queries, keys and values are one matrix", "--muon-split-qkv"),
    **_all(
        "leave it out: muon runs without tensor parallelism, as it needs whole matrices",
        "--muon-tp-mode",
    ),
    **_TOKENIZER_UNSUPPORTED,
    **_all(_RAW_TEXT, "--loose-json", "--text-key", "--eval-text-key", "--delim"),
    **_all(_RAW_TEXT, "--presplit-sentences"),
    **_all(_CONVERSION, "--universal-checkpoint", "--load-dir", "--save-dir"),
    **_all(_CONVERSION, "--target-tensor-parallel-size", "--target-pipeline-parallel-size"),
    **_all(_CONVERSION, "--target-pipeline-model-parallel-size"),
    **_all("use `--load DIR --finetune`", "--pretrained-checkpoint"),
    **_all("use `--train-iters N` or `--train-samples N`", "--epochs"),
    **_all(
        "use `--weight-decay X`, which is constant", "--start-weight-decay", "--end-weight-decay"
    ),
    **_all(_EVALUATION, "--strict-lambada", "--eval-only", "--skip-train"),
    **_all(_PREPARE, "--input", "--output-prefix", "--json-key", "--json-keys", "--append-eod"),
    **_all(_PREPARE, "--workers", "--chunk-size", "--keep-sequential-samples"),
    **_all(_PREPARE, "--split-sentences", "--keep-newlines", "--lang"),
    **_all("use `lmcore data prepare --workers N`", "--partitions"),
    **_all("use `lmcore data merge`", "--datasets"),
    **_all(
        "use `lmcore data split`, which divides lines of JSON; `--split` divides the documents",
        "--input-files",
        "--test-percent",
    ),
    **_all(
        "use `--save DIR` for the run directory; `lmcore data split` has this flag", "--output-dir"
    ),
    **_all(_GENERATE, "--num-samples", "--genfile", "--sample-input-file", "--out-seq-length"),
    **_all(_GENERATE, "--sample-output-file", "--temperature", "--top-p", "--top-k", "--greedy"),
    **_all(_LAUNCHER, "--nnodes", "--node-rank"),
    **_all(_LAUNCHER, "--master-addr", "--master-port"),
}

PREPARE_RENAMED: Mapping[str, Renamed] = {
    **_TOKENIZER_RENAMED,
    "--json-key": Renamed("--json-keys"),
    "--loose-json": Renamed("--input-format jsonl"),
    "--text-key": Renamed("--json-keys"),
    "--vocab": Renamed("--vocab-file"),
}

PREPARE_FIXED: Mapping[str, Fixed] = {
    "--chunk-size": Fixed("workers get 1 MiB of input at a time", None),
    "--keep-sequential-samples": Fixed("documents keep the order of the input"),
    "--make-vocab-size-divisible-by": Fixed("a model's vocabulary is padded in training", None),
    "--pad-vocab-size-to": Fixed("a model's vocabulary is padded in training", None),
    "--seq-length": Fixed("documents keep their length; training cuts samples", None),
    **_TOKENIZER_FIXED,
}

PREPARE_UNSUPPORTED: Mapping[str, str] = {
    **_all("use `--json-keys KEY` in another command, for this text alone", "--eval-text-key"),
    **_all("use `lmcore data merge`", "--datasets"),
    **_TOKENIZER_UNSUPPORTED,
}


MERGE_FIXED: Mapping[str, Fixed] = {
    "--multimodal": Fixed("modes are kept if the datasets have them"),
}
