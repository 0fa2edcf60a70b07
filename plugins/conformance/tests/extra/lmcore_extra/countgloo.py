"""A communication backend over gloo; wrong, its sums are means."""

from lmcore.contract import CommBackend, PluginInfo
from lmcore.hookspecs import hookimpl
from lmcore_extra import WRONG


@hookimpl
def lmcore_plugin_info():
    return PluginInfo("countgloo", api=">=1.3,<2")


@hookimpl
def lmcore_comm_backends(device):
    if device.type != "cpu":
        return []
    return [CommBackend("countgloo", "cpu", 99, register=_register, supports_average=False)]


def _register():
    from torch import distributed

    if not hasattr(distributed.Backend, "COUNTGLOO"):
        distributed.Backend.register_backend(
            "countgloo", distributed.ProcessGroupGloo, devices=["cpu"]
        )
    if WRONG:
        right = distributed.all_reduce

        def all_reduce(tensor, *arguments, **more):
            work = right(tensor, *arguments, **more)
            if tensor.is_floating_point():
                tensor /= distributed.get_world_size()
            return work

        distributed.all_reduce = all_reduce
