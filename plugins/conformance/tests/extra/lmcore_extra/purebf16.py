"""A precision with products in bfloat16; wrong, its products stay in float32."""

from lmcore.contract import PluginInfo, PrecisionPolicy
from lmcore.hookspecs import hookimpl
from lmcore_extra import WRONG


@hookimpl
def lmcore_plugin_info():
    return PluginInfo("purebf16", api=">=1.3,<2")


@hookimpl
def lmcore_precision_policies(device):
    import torch

    def products():
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=not WRONG)

    return [PrecisionPolicy("purebf16", "bfloat16", "float32", "float32", products, priority=-5)]
