"""A checkpoint stager that clones; wrong, it returns views of the live tensors."""

from lmcore.contract import CheckpointStager, PluginInfo
from lmcore.hookspecs import hookimpl
from lmcore_extra import WRONG


@hookimpl
def lmcore_plugin_info():
    return PluginInfo("slowstager", api=">=1.3,<2")


@hookimpl
def lmcore_checkpoint_stagers():
    def stage(tensors):
        if WRONG:
            return {name: live.detach().view(live.shape) for name, live in tensors.items()}
        return {name: live.detach().to("cpu", copy=True) for name, live in tensors.items()}

    return [CheckpointStager("slowstager", stage, priority=99)]
