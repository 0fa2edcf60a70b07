"""Creation of the optimizer of a run.

Each class is imported when it is created: a run with one optimizer does not import any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from lmcore.optim.optimizer import Optimizer, SumOverShards, parameter_groups

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lmcore.config.section.optimizer import OptimizerSection

__all__ = ["create_optimizer"]

Named = tuple[tuple[str, "nn.Parameter"], ...]
Bind = Callable[[str], Callable[..., None]]


def create_optimizer(
    settings: OptimizerSection,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    bind: Bind,
    sum_over_shards: SumOverShards | None = None,
    warns: bool = True,
    owns_weights: bool = False,
    copies: torch.dtype | None = None,
) -> Optimizer:
    """Return the optimizer of a run, with initial state.

    Args:
        settings: Name and options of the optimizer.
        named_parameters: Names and parameters to train, whole or shards of this process; see
            `lmcore.config.optimizers` for the optimizers that can update shards.
        bind: Function that returns the kernel of an op by the op's name.
        sum_over_shards: Sum of numbers over the processes that hold shards of a parameter; None
            if every parameter is whole.
        warns: True to log warnings about an imported class; one rank of a run is enough.
        owns_weights: True if nothing else keeps the memory of a parameter; see `AdamW`.
        copies: Dtype of products, if it is not the dtype of the weights; see `AdamW`.
    """
    named: Named = tuple(named_parameters)
    if settings.optimizer == "lamb":
        from lmcore.optim.lamb import LAMB

        return LAMB(
            parameter_groups(named, settings.weight_decay),
            betas=(settings.adam_beta1, settings.adam_beta2),
            epsilon=settings.adam_eps,
            sum_over_shards=sum_over_shards,
        )
    if ":" in settings.optimizer:
        from lmcore.optim.class_trial import create_torch_optimizer

        return create_torch_optimizer(
            parameter_groups(named, settings.weight_decay),
            settings.optimizer,
            settings.optimizer_args,
            elementwise=settings.optimizer_elementwise,
            warns=warns,
        )
    if settings.optimizer == "adam":
        from lmcore.optim.adamw import AdamW

        return AdamW(
            parameter_groups(named, settings.weight_decay),
            bind("adamw"),
            betas=(settings.adam_beta1, settings.adam_beta2),
            epsilon=settings.adam_eps,
            owns_weights=owns_weights,
            copies=copies,
        )
    return _MAKERS[settings.optimizer](settings, named, bind)


def _adam8bit(settings: OptimizerSection, named: Named, bind: Bind) -> Optimizer:
    from lmcore.optim.adam8bit import AdamW8bit

    return AdamW8bit(
        parameter_groups(named, settings.weight_decay),
        bind("adamw"),
        betas=(settings.adam_beta1, settings.adam_beta2),
        epsilon=settings.adam_eps,
    )


def _sgd(settings: OptimizerSection, named: Named, bind: Bind) -> Optimizer:  # noqa: ARG001
    from lmcore.optim.elementwise import SGD

    return SGD(parameter_groups(named, settings.weight_decay), momentum=settings.sgd_momentum)


def _adopt(settings: OptimizerSection, named: Named, bind: Bind) -> Optimizer:  # noqa: ARG001
    from lmcore.optim.elementwise import ADOPT

    return ADOPT(
        parameter_groups(named, settings.weight_decay),
        betas=(settings.adam_beta1, settings.adam_beta2),
        epsilon=settings.adam_eps,
    )


def _sophia(settings: OptimizerSection, named: Named, bind: Bind) -> Optimizer:  # noqa: ARG001
    from lmcore.optim.elementwise import Sophia

    return Sophia(
        parameter_groups(named, settings.weight_decay),
        betas=(settings.sophiag_beta1, settings.sophiag_beta2),
        rho=settings.sophiag_rho,
        interval=settings.sophiag_hessian_interval,
    )


def _schedule_free(settings: OptimizerSection, named: Named, bind: Bind) -> Optimizer:  # noqa: ARG001
    from lmcore.optim.elementwise import ScheduleFreeAdamW

    return ScheduleFreeAdamW(
        parameter_groups(named, settings.weight_decay),
        betas=(settings.adam_beta1, settings.adam_beta2),
        epsilon=settings.adam_eps,
    )


def _muon(settings: OptimizerSection, named: Named, bind: Bind) -> Optimizer:
    from lmcore.optim.muon import Muon

    return Muon(
        named,
        bind("adamw"),
        weight_decay=settings.weight_decay,
        momentum=settings.muon_momentum,
        nesterov=settings.muon_nesterov,
        num_iterations=settings.muon_num_ns_steps,
        betas=(settings.adam_beta1, settings.adam_beta2),
        epsilon=settings.adam_eps,
    )


def _shampoo(settings: OptimizerSection, named: Named, bind: Bind) -> Optimizer:
    from lmcore.optim.shampoo import Shampoo

    return Shampoo(
        named,
        bind("adamw"),
        weight_decay=settings.weight_decay,
        betas=(settings.adam_beta1, settings.adam_beta2),
        epsilon=settings.adam_eps,
        root_epsilon=settings.shampoo_eps,
        block_size=settings.shampoo_max_preconditioner_dim,
        frequency=settings.shampoo_precondition_frequency,
    )


_MAKERS: dict[str, Callable[[OptimizerSection, Named, Bind], Optimizer]] = {
    "sgd": _sgd,
    "muon": _muon,
    "sophia": _sophia,
    "adopt": _adopt,
    "shampoo": _shampoo,
    "schedulefree": _schedule_free,
    "adam8bit": _adam8bit,
}
