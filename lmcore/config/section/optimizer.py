"""Optimizer, gradient clipping and learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer and its learning-rate schedule, in samples as Megatron counts."""

    optimizer: str = option(
        "adam",
        "Optimizer; all but `sgd` have decoupled weight decay.",
        choices=(
            "adam",
            "sgd",
            "lamb",
            "muon",
            "sophia",
            "adopt",
            "shampoo",
            "schedulefree",
            "adam8bit",
        ),
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
        None,
        "Share of the decay steps used to warm up; default: 0.05 where no rate is given either.",
        minimum=0,
        maximum=1,
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
    weight_decay: float = option(0.01, "Weight decay; biases and norms have none.", minimum=0)
    adam_beta1: float = option(0.9, "Decay of the first moment.", minimum=0, below=1)
    adam_beta2: float = option(0.999, "Decay of the second moment.", minimum=0, below=1)
    adam_eps: float = option(1e-8, "Added to the root of the second moment.", above=0)
    sgd_momentum: float = option(0.9, "Momentum of `sgd`.", minimum=0, below=1)
    muon_momentum: float = option(0.95, "Momentum of `muon`.", minimum=0, below=1)
    muon_nesterov: bool = option(True, "Add the gradient to the momentum of `muon` once more.")
    muon_num_ns_steps: int = option(5, "Newton-Schulz iterations of `muon`.", minimum=1, maximum=99)
    sophiag_beta1: float = option(0.965, "Decay of the momentum of `sophia`.", minimum=0, below=1)
    sophiag_beta2: float = option(0.99, "Decay of the curvature of `sophia`.", minimum=0, below=1)
    sophiag_rho: float = option(
        0.05, "Factor of the curvature of `sophia`; a lower one clips more.", above=0
    )
    sophiag_hessian_interval: int = option(
        10, "Steps from one estimate of the curvature of `sophia` to the next.", minimum=1
    )
    shampoo_eps: float = option(
        1e-12, "Added to the statistics of `shampoo` before their root.", above=0
    )
    shampoo_max_preconditioner_dim: int = option(
        1024, "Largest side of a block that has preconditioners of its own.", minimum=1
    )
    shampoo_precondition_frequency: int = option(
        50, "Steps from one computation of the preconditioners to the next.", minimum=1
    )
    clip_grad: float = option(1.0, "Largest gradient norm; 0 does not clip.", minimum=0)
