"""Megatron's flags, so that its users' commands work: three tables and nothing else.

`RENAMED` flags are translated, `FIXED` ones are what happens anyway, `UNSUPPORTED` ones are refused
with a hint.  A flag that is an option of ours by the same name stands in none of them.
The names are those of the Megatron family: old and new Megatron-LM, its DeepSpeed forks, and the
tools beside them.  Vendor names occur here only as parts of those flags and their values.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from lmcore.config.options.command_line import ForeignFlag, Translation, UnsupportedFlagError

__all__ = [
    "FIXED",
    "MERGE_FIXED",
    "PREPARE_FIXED",
    "PREPARE_RENAMED",
    "PREPARE_UNSUPPORTED",
    "RENAMED",
    "UNSUPPORTED",
    "Fixed",
    "Renamed",
    "merge_flags",
    "prepare_flags",
    "train_flags",
]


@dataclass(frozen=True)
class Renamed:
    """A flag with another name today.

    Attributes:
        today: The flag of today, with its value where that is fixed: "--precision bf16".
        only: The values that have an equivalent; None: every value is passed on.
        hint: What to do about any other value.
        whole: Whether the flags of today need no value besides; default: if there is one in them.
    """

    today: str
    only: tuple[str, ...] | None = None
    hint: str = ""
    whole: bool | None = None


@dataclass(frozen=True)
class Fixed:
    """A flag whose effect is what happens anyway.

    Attributes:
        note: What happens.
        only: The values of which that is true; None: of every value; (): it takes none.
        hint: What to do about any other value.
    """

    note: str
    only: tuple[str, ...] | None = ()
    hint: str = ""


_LATER = "not in this version"

_TOKENIZER_RENAMED = {"--tokenizer-hf-include-special-tokens": Renamed("--add-special-tokens")}
_TOKENIZER_FIXED = {
    "--tokenizer-hf-use-fast": Fixed("one library reads every `tokenizer.json`"),
    "--tokenizer-sentencepiece-legacy": Fixed("special tokens follow the pieces of the model"),
}

RENAMED: Mapping[str, Renamed] = {
    "--batch-size": Renamed("--micro-batch-size"),
    "--model-parallel-size": Renamed("--tensor-model-parallel-size"),
    "--warmup": Renamed("--lr-warmup-fraction"),
    "--vocab": Renamed("--vocab-file"),
    **_TOKENIZER_RENAMED,
    "--fine-tune": Renamed("--finetune"),
    "--deepspeed": Renamed("--engine deepspeed"),
    "--cpu-optimizer": Renamed("--cpu-offload"),
    "--num-gpus": Renamed("--nproc-per-node"),
    "--ds-sequence-parallel-size": Renamed("--context-parallel-size"),
    "--use-checkpoint-opt-params-scheduler": Renamed("--use-checkpoint-opt-param-scheduler"),
    "--enable-cuda-graph": Renamed("--step-graph", whole=True),
    "--bf16": Renamed("--precision bf16"),
    "--fp16": Renamed("--precision fp16"),
    "--norm-epsilon": Renamed("--layernorm-epsilon"),
    "--use-rotary-position-embeddings": Renamed("--position-embedding-type rope"),
    "--no-position-embedding": Renamed("--position-embedding-type none"),
    "--rope-theta": Renamed("--rotary-base"),
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
_SWITCHES = {
    "--add-special-tokens",
    "--cpu-offload",
    "--finetune",
    "--muon-nesterov",
    "--no-add-bias-linear",
    "--profile-shapes",
    "--profile-stacks",
    "--use-checkpoint-opt-param-scheduler",
}

_PROFILER = Fixed("`--profile` uses torch's profiler, and names the parts of a step")
_KERNELS = Fixed(
    "kernels are chosen op by op, the fastest the device offers; `--ops` prefers others"
)
_EVENTS = Fixed("TensorBoard gets what metrics.jsonl gets")
_KEPT = "weights stay in fp32 under bf16 and fp16, and so do"

_FORMAT = Fixed(
    "the format is read from the file; every one is memory-mapped",
    ("infer", "mmap", "cached", "lazy"),
    "prepare the data again",
)

FIXED: Mapping[str, Fixed] = {
    "--expert-model-parallel-size": Fixed(
        "the model has no experts", ("1",), f"models of experts are {_LATER}: use 1"
    ),
    "--DDP-impl": Fixed(
        "gradients are summed over the processes", ("local", "torch"), "use `--zero-stage 3`"
    ),
    "--local-rank": Fixed("the rank is read from the environment", None),
    "--no-async-tensor-model-parallel-allreduce": Fixed(
        "sums over the processes of a layer are waited for"
    ),
    "--overlap-grad-reduce": Fixed("gradients are exchanged while backward still runs"),
    "--accumulate-allreduce-grads-in-fp32": Fixed(f"{_KEPT} gradients, in every sum of them"),
    "--fp32-residual-connection": Fixed(f"{_KEPT} embeddings and the residual stream"),
    "--embedding-weights-in-fp32": Fixed(f"{_KEPT} those of the embeddings"),
    "--attention-softmax-in-fp32": Fixed("softmax is computed in fp32"),
    "--no-query-key-layer-scaling": Fixed("scores are scaled by the head size alone"),
    "--use-cpu-initialization": Fixed("weights do not depend on the device they are made on"),
    "--use-flash-attn": _KERNELS,
    "--use-flash-attn-v1": _KERNELS,
    "--use-flash-attn-v2": _KERNELS,
    "--use-flash-attn-triton": _KERNELS,
    "--use-flash-attn-builder": _KERNELS,
    "--attention-backend": Fixed(_KERNELS.note, None),
    "--transformer-impl": Fixed(_KERNELS.note, None),
    "--no-bias-gelu-fusion": _KERNELS,
    "--no-bias-swiglu-fusion": _KERNELS,
    "--no-rope-fusion": _KERNELS,
    "--no-bias-dropout-fusion": _KERNELS,
    "--no-masked-softmax-fusion": _KERNELS,
    "--no-gradient-accumulation-fusion": _KERNELS,
    "--use-mcore-models": Fixed("there is one transformer"),
    "--cpu-torch-adam": Fixed("the update is torch's own wherever the optimizer's state lies"),
    "--ds-fused-adam": Fixed("the update is the device's own kernel"),
    "--deepspeed-activation-checkpointing": Fixed("`--recompute` alone says what is recomputed"),
    "--dataset-impl": _FORMAT,
    "--data-impl": _FORMAT,
    "--mmap-warmup": Fixed("data is memory-mapped"),
    "--resume-dataloader": Fixed("a resumed run continues with the next sample"),
    "--num-workers": Fixed(
        "batches are cut from mapped files; `--num-prefetch` sets how many", None
    ),
    "--cache-dir": Fixed("nothing is downloaded", None),
    **_TOKENIZER_FIXED,
    "--exit-signal-handler": Fixed("a termination signal saves and exits"),
    "--ckpt-format": Fixed(
        "checkpoints are torch's distributed ones", ("torch_dist",), f"others are {_LATER}"
    ),
    "--auto-detect-ckpt-format": Fixed("a checkpoint's format is read from its manifest"),
    "--check-for-nan-in-loss-and-grad": Fixed("a loss that is not finite stops the run"),
    "--log-throughput": Fixed("the training line shows tokens/s and MFU"),
    "--log-timers-to-tensorboard": _EVENTS,
    "--log-optimizer-states-to-tensorboard": _EVENTS,
    "--log-batch-size-to-tensorboard": _EVENTS,
    "--log-learning-rate-to-tensorboard": _EVENTS,
    "--log-validation-ppl-to-tensorboard": _EVENTS,
    "--log-loss-scale-to-tensorboard": _EVENTS,
    "--muon-scale-mode": Fixed(
        "an update has the size of AdamW's: `spectral` with the factor 0.2",
        ("spectral",),
        "leave it out: an update has the size of AdamW's",
    ),
    "--muon-extra-scale-factor": Fixed(
        "an update has the size of AdamW's",
        ("0.2",),
        "multiply `--lr`: the factor is 0.2",
    ),
    "--muon-no-split-qkv": Fixed("queries, keys and values are one matrix"),
    "--muon-fp32-matmul-prec": Fixed("the iteration runs in bfloat16", None),
    "--schedulefree-for-each": Fixed("all weights are updated together"),
    "--dshampooadamw-use-decoupled-weight-decay": Fixed(
        "the decay is decoupled", ("True", "true"), "leave it out: the decay is decoupled"
    ),
    "--use-pytorch-profiler": _PROFILER,
    "--nvtx-ranges": _PROFILER,
    "--no-manual-gc-eval": Fixed("garbage is collected between steps alone"),
    "--timing-log-level": Fixed("step times are always recorded", None),
}

_GPT_ONLY = "this version trains models like GPT-2 and Llama"
_PREPARE = "it belongs to `lmcore data prepare`"
_GENERATE = "it belongs to `lmcore generate`"
_LAUNCHER = "it belongs to the launcher, before the command"
_EVALUATION = f"evaluation tasks are {_LATER}"
_ENGINE_FILE = "use `--engine deepspeed`, and `--deepspeed-config FILE` for a file"
_CONVERSION = f"converting checkpoints is {_LATER}"
_RUN_CONFIG = "start from the run's settings: `lmcore train RUN/config.yaml --load RUN`"
_RAW_TEXT = "prepare the text with `lmcore data prepare --json-keys KEY`, then give `--data-path`"
_TRACKING = "metrics.jsonl and TensorBoard in the run directory hold the same figures"
_MEMORY = "use `--profile --profile-memory`, which records allocations in the trace"
_TIKTOKEN = "convert the vocabulary to a `tokenizer.json`, for `--tokenizer-type HFTokenizer`"
_GRAPH = "use `--step-graph`, which records forward and backward of a micro-batch"
_IN_CORPUS = "files are blended by weight, and the samples of each shuffled: leave it out"
_TOKENIZER_UNSUPPORTED = {
    "--trust-remote-code": "a tokenizer's own code is never run: give a `tokenizer.json`",
    "--tokenizer-special-tokens": "use `--vocab-extra-ids`, or add them to the tokenizer's files",
    "--tiktoken-pattern": _TIKTOKEN,
    "--tiktoken-num-special-tokens": _TIKTOKEN,
}


def _all(hint: str, *flags: str) -> dict[str, str]:
    return dict.fromkeys(flags, hint)


UNSUPPORTED: Mapping[str, str] = {
    **_all(_GRAPH, "--cuda-graph-impl", "--external-cuda-graph"),
    **_all(_GRAPH, "--cuda-graph-scope", "--cuda-graph-warmup-steps"),
    "--shuffle-sample-in-corpus": _IN_CORPUS,
    "--blend-sample-in-corpus": _IN_CORPUS,
    **_all("leave it out: the loss is computed in fp32", "--fp16-lm-cross-entropy"),
    **_all(f"models of experts are {_LATER}", "--num-experts"),
    **_all(
        f"models with an encoder and a decoder are {_LATER}", "--pipeline-model-parallel-split-rank"
    ),
    **_all(_ENGINE_FILE, "--deepscale", "--deepscale-config", "--deepspeed-mpi"),
    **_all("use `--global-batch-size`", "--num-microbatches-in-minibatch"),
    **_all("use a batch that divides", "--decrease-batch-size-if-needed"),
    **_all("channels are rotated in halves, i with i + R", "--rotary-interleaved"),
    **_all("use `--use-rope-scaling`", "--rotary-seq-len-interpolation-factor"),
    **_all(_GPT_ONLY, "--encoder-seq-length", "--decoder-seq-length", "--encoder-num-layers"),
    **_all(_GPT_ONLY, "--decoder-num-layers", "--apply-layernorm-1p", "--squared-relu"),
    **_all(_GPT_ONLY, "--bert-load", "--bert-no-binary-head", "--short-seq-prob", "--mask-prob"),
    **_all(_GPT_ONLY, "--ict-head-size", "--ict-load", "--query-in-block-prob"),
    **_all(_GPT_ONLY, "--titles-data-path", "--use-one-sent-docs", "--block-data-path"),
    **_all(_GPT_ONLY, "--indexer-batch-size", "--indexer-log-interval", "--model-type"),
    **_all("use `--init-method-std`", "--init-method-xavier-uniform"),
    **_all(_MEMORY, "--record-memory-history", "--memory-snapshot-path"),
    **_all("queries, keys and values are one matrix: leave it out", "--muon-split-qkv"),
    **_all("muon needs whole matrices: use another `--optimizer`", "--muon-tp-mode"),
    **_TOKENIZER_UNSUPPORTED,
    **_all(_RAW_TEXT, "--loose-json", "--text-key", "--eval-text-key", "--delim"),
    **_all(_RAW_TEXT, "--presplit-sentences"),
    **_all(_RUN_CONFIG, "--use-checkpoint-args"),
    **_all("give `--load` one `iter_XXXXXXX` directory", "--load-tag", "--ckpt-step"),
    **_all(_CONVERSION, "--universal-checkpoint", "--load-dir", "--save-dir"),
    **_all(_CONVERSION, "--target-tensor-parallel-size", "--target-pipeline-parallel-size"),
    **_all(_CONVERSION, "--target-pipeline-model-parallel-size"),
    **_all("use `--load` with `--finetune`", "--pretrained-checkpoint"),
    **_all("use `--train-iters` or `--train-samples`", "--epochs"),
    **_all("use one `--weight-decay`", "--start-weight-decay", "--end-weight-decay"),
    **_all("leave the data out when it is prepared", "--skip-train-iteration-range"),
    **_all(_EVALUATION, "--task", "--strict-lambada", "--eval-only", "--skip-train"),
    **_all(_TRACKING, "--wandb-project", "--wandb-exp-name", "--wandb-save-dir"),
    **_all(_TRACKING, "--codecarbon-dir", "--log-params-norm", "--log-num-zeros-in-grad"),
    **_all(_PREPARE, "--input", "--output-prefix", "--json-key", "--json-keys", "--append-eod"),
    **_all(_PREPARE, "--workers", "--chunk-size", "--keep-sequential-samples"),
    **_all(_PREPARE, "--split-sentences", "--keep-newlines", "--lang"),
    **_all("use `lmcore data prepare --workers N`", "--partitions"),
    **_all("use `lmcore data merge`", "--datasets"),
    **_all(
        "`--split` divides the documents, `lmcore data split` lines of JSON",
        "--input-files",
        "--test-percent",
    ),
    **_all("`--save` names a run's directory; of `lmcore data split` it is a flag", "--output-dir"),
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
    "--chunk-size": Fixed("workers get batches of 1 MiB of input", None),
    "--keep-sequential-samples": Fixed("documents keep the order of the input"),
    **_TOKENIZER_FIXED,
}

PREPARE_UNSUPPORTED: Mapping[str, str] = {
    **_all("prepare that text by itself, with `--json-keys KEY`", "--eval-text-key"),
    **_all("use `lmcore data merge`", "--datasets"),
    **_TOKENIZER_UNSUPPORTED,
}


MERGE_FIXED: Mapping[str, Fixed] = {
    "--multimodal": Fixed("modes are kept where the data sets have them"),
}


@functools.cache
def train_flags() -> Mapping[str, ForeignFlag]:
    """Return what `lmcore train` understands of Megatron's flags, by flag."""
    return _foreign(RENAMED, FIXED, UNSUPPORTED)


@functools.cache
def prepare_flags() -> Mapping[str, ForeignFlag]:
    """Return what `lmcore data prepare` understands of Megatron's flags, by flag."""
    return _foreign(PREPARE_RENAMED, PREPARE_FIXED, PREPARE_UNSUPPORTED)


@functools.cache
def merge_flags() -> Mapping[str, ForeignFlag]:
    """Return what `lmcore data merge` understands of Megatron's flags, by flag."""
    return _foreign({}, MERGE_FIXED, {})


def _foreign(
    renamed: Mapping[str, Renamed], fixed: Mapping[str, Fixed], unsupported: Mapping[str, str]
) -> dict[str, ForeignFlag]:
    flags: dict[str, ForeignFlag] = {}
    for name, one in renamed.items():
        whole = one.whole
        if whole is None:
            whole = " " in one.today or one.today in _SWITCHES
        arity = "1" if one.only else ("0" if whole else "+")
        flags[name] = ForeignFlag(arity, functools.partial(_rename, name, one), one.today)
    for name, same in fixed.items():
        arity = "0" if same.only == () else ("1" if same.only else "?")
        flags[name] = ForeignFlag(arity, functools.partial(_accept, name, same))
    for name, hint in unsupported.items():
        flags[name] = ForeignFlag("*", functools.partial(_refuse, name, hint))
    return flags


def _rename(name: str, one: Renamed, values: tuple[str, ...]) -> Translation:
    typed = " ".join((name, *values))
    if one.only and values[0] not in one.only:
        return Translation(
            problem=UnsupportedFlagError(f"`{typed}` is not supported", hint=one.hint)
        )
    passed = () if one.only else values
    today = (*one.today.split(), *passed)
    return Translation(today, notice=f"`{typed}` is Megatron's name; today: `{' '.join(today)}`")


def _accept(name: str, same: Fixed, values: tuple[str, ...]) -> Translation:
    typed = " ".join((name, *values))
    if same.only and values[0] not in same.only:
        return Translation(
            problem=UnsupportedFlagError(f"`{typed}` is not supported", hint=same.hint)
        )
    return Translation(notice=f"`{typed}` changes nothing: {same.note}")


def _refuse(name: str, hint: str, values: tuple[str, ...]) -> Translation:
    typed = " ".join((name, *values))
    return Translation(problem=UnsupportedFlagError(f"`{typed}` is not supported", hint=hint))
