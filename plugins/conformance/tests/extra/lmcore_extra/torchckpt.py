"""A recompute policy by torch.utils.checkpoint; wrong, dropout differs when it is repeated."""

from lmcore.contract import PluginInfo, RecomputePolicy
from lmcore.hookspecs import hookimpl
from lmcore_extra import WRONG


@hookimpl
def lmcore_plugin_info():
    return PluginInfo("torchckpt", api=">=1.3,<2")


@hookimpl
def lmcore_recompute_policies():
    def run(call, *tensors, remember):
        from contextlib import nullcontext

        from torch.utils.checkpoint import checkpoint

        again = nullcontext if WRONG else remember()
        return checkpoint(
            call,
            *tensors,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), again()),
        )

    return [RecomputePolicy("torchckpt", "repeats whole layers", block=run)]
