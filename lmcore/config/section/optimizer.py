"""Optimizer, gradient clipping and learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW and its learning-rate schedule, in samples as Megatron counts."""

    optimizer: str = option(
        "adam", "Optimizer; `adam` has decoupled weight decay.", choices=("adam",)
    )
    lr: float = option(2e-3, "Highest learning rate.", above=0)
    min_lr: float = option(0.0, "Lowest learning rate after decay.", minimum=0)
    lr_decay_style: str = option(
        "cosine",
        "Shape of the decay.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "constant-cooldown"),
    )
    lr_decay_iters: int | None = option(
        None, "Steps over which the rate decays; default: train_iters.", minimum=1
    )
    lr_decay_samples: int | None = option(
        None, "Samples over which the rate decays; goes with train_samples.", minimum=1
    )
    lr_warmup_fraction: float | None = option(
        None, "Share of the decay steps used to warm up.", minimum=0, maximum=1
    )
    lr_warmup_iters: int = option(0, "Steps of linear warm-up.", minimum=0)
    lr_warmup_samples: int = option(
        0, "Samples of linear warm-up; goes with train_samples.", minimum=0
    )
    lr_cooldown_fraction: float = option(
        0.2,
        "Last share of the decay steps that `constant-cooldown` spends going down.",
        above=0,
        maximum=1,
    )
    weight_decay: float = option(
        0.01, "Decoupled weight decay; biases and norms have none.", minimum=0
    )
    adam_beta1: float = option(0.9, "Decay of the first moment.", minimum=0, below=1)
    adam_beta2: float = option(0.999, "Decay of the second moment.", minimum=0, below=1)
    adam_eps: float = option(1e-8, "Added to the root of the second moment.", above=0)
    clip_grad: float = option(1.0, "Largest gradient norm; 0 does not clip.", minimum=0)
