"""Section `optimizer`: optimizer, gradient clipping and learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.need import Need, setting
from lmcore.config.option import CHECKED, FREE, option

_ADAM = setting(
    "--optimizer", "adam", "lamb", "muon", "adopt", "shampoo", "schedulefree", "adam8bit"
).else_error("other optimizers do not have it")
_SGD, _MUON, _SOPHIA, _SHAMPOO = (
    setting("--optimizer", name).else_error("other optimizers do not have it")
    for name in ("sgd", "muon", "sophia", "shampoo")
)
_IMPORTED = Need(
    "`--optimizer module:Class`",
    lambda run: ":" in run.config.optimizer.optimizer,
    refused="other optimizers do not have it",
)
_IN_STEPS = Need(
    "a length in steps, `--train-iters`", lambda run: run.config.training.train_samples is None
)
_IN_SAMPLES = setting("--train-samples")
_DECAY = Need(
    "`--lr-decay-style` other than `constant`",
    lambda run: run.config.optimizer.lr_decay_style != "constant",
)
_DECAY_LENGTH = Need(
    "`--lr-decay-style` other than `constant`, or `--lr-warmup-fraction`",
    lambda run: (
        run.config.optimizer.lr_decay_style != "constant"
        or bool(run.config.optimizer.lr_warmup_fraction)
    ),
)


@dataclass(frozen=True)
class OptimizerSection:
    """Optimizer, gradient clipping and learning-rate schedule."""

    optimizer: str = option(
        "adam",
        "Optimizer, with decoupled weight decay in all but `sgd`: `adam` is AdamW; or the import "
        "path of a `torch.optim.Optimizer` class, such as `torch.optim:NAdam`.",
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
        form="module:Class",
        aliases={"adamw": "adam", "sophiag": "sophia", "adamwschedulefree": "schedulefree"},
        on_resume=CHECKED,
    )
    optimizer_args: tuple[str, ...] = option(
        (), "Arguments of an imported optimizer class.", metavar="KEY=VALUE", needs=_IMPORTED
    )
    optimizer_elementwise: bool = option(
        False,
        "Shard the parameters of an imported optimizer: it updates each weight from its own "
        "gradient and state alone.",
        on_resume=FREE,
        needs=_IMPORTED,
    )
    lr: float = option(2e-3, "Peak learning rate, after warm-up.", above=0, on_resume=CHECKED)
    min_lr: float = option(
        0.0,
        "Learning rate at the end of the decay.",
        minimum=0,
        on_resume=CHECKED,
        needs=_DECAY.or_off(0.0),
    )
    lr_decay_style: str = option(
        "cosine",
        "Shape of the learning-rate decay.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "constant-cooldown"),
        on_resume=CHECKED,
    )
    lr_decay_iters: int | None = option(
        None,
        "Steps over which the learning rate decays; default: train_iters.",
        minimum=1,
        on_resume=CHECKED,
        needs=(_IN_STEPS, _DECAY_LENGTH),
    )
    lr_decay_samples: int | None = option(
        None,
        "Samples over which the learning rate decays; needs train_samples.",
        minimum=1,
        on_resume=CHECKED,
        needs=(_IN_SAMPLES, _DECAY_LENGTH),
    )
    lr_warmup_fraction: float | None = option(
        0.05,
        "Fraction of the decay used for linear learning-rate warm-up; 0: none; default: 0.05 "
        "unless lr_warmup_iters or lr_warmup_samples is given.",
        minimum=0,
        maximum=1,
        on_resume=CHECKED,
    )
    lr_warmup_iters: int = option(
        0,
        "Steps of linear learning-rate warm-up.",
        minimum=0,
        on_resume=CHECKED,
        needs=_IN_STEPS.or_off(0),
    )
    lr_warmup_samples: int = option(
        0,
        "Samples of linear learning-rate warm-up; needs train_samples.",
        minimum=0,
        on_resume=CHECKED,
        needs=_IN_SAMPLES.or_off(0),
    )
    lr_cooldown_fraction: float = option(
        0.2,
        "Fraction of the decay, at its end, over which `constant-cooldown` lowers the rate.",
        above=0,
        maximum=1,
        on_resume=CHECKED,
        needs=setting("--lr-decay-style", "constant-cooldown"),
    )
    weight_decay: float = option(
        0.01, "Weight decay; not applied to biases and normalization weights.", minimum=0
    )
    adam_beta1: float = option(
        0.9,
        "Decay rate of the first moment, in Adam and its relatives.",
        minimum=0,
        below=1,
        needs=_ADAM,
    )
    adam_beta2: float = option(
        0.999,
        "Decay rate of the second moment, in Adam and its relatives.",
        minimum=0,
        below=1,
        needs=_ADAM,
    )
    adam_eps: float = option(
        1e-8, "Epsilon added to the root of the second moment.", above=0, needs=_ADAM
    )
    sgd_momentum: float = option(0.9, "Momentum of `sgd`.", minimum=0, below=1, needs=_SGD)
    muon_momentum: float = option(0.95, "Momentum of `muon`.", minimum=0, below=1, needs=_MUON)
    muon_nesterov: bool = option(True, "Use Nesterov momentum in `muon`.", needs=_MUON)
    muon_num_ns_steps: int = option(
        5, "Newton-Schulz iterations of `muon`.", minimum=1, maximum=99, needs=_MUON
    )
    sophiag_beta1: float = option(
        0.965, "Decay rate of the momentum of `sophia`.", minimum=0, below=1, needs=_SOPHIA
    )
    sophiag_beta2: float = option(
        0.99, "Decay rate of the Hessian estimate of `sophia`.", minimum=0, below=1, needs=_SOPHIA
    )
    sophiag_rho: float = option(
        0.05,
        "Factor of the Hessian estimate of `sophia`; smaller values clip more updates.",
        above=0,
        needs=_SOPHIA,
    )
    sophiag_hessian_interval: int = option(
        10, "Steps between Hessian estimates of `sophia`.", minimum=1, needs=_SOPHIA
    )
    shampoo_eps: float = option(
        1e-12,
        "Epsilon added to the statistics of `shampoo` before their root.",
        above=0,
        needs=_SHAMPOO,
    )
    shampoo_max_preconditioner_dim: int = option(
        1024,
        "Largest side of a `shampoo` block, which has its own preconditioners.",
        minimum=1,
        on_resume=CHECKED,
        needs=_SHAMPOO,
    )
    shampoo_precondition_frequency: int = option(
        50,
        "Steps between computations of the preconditioners of `shampoo`.",
        minimum=1,
        needs=_SHAMPOO,
    )
    clip_grad: float = option(
        1.0, "Clip gradients to this global L2 norm; 0: no clipping.", minimum=0
    )
