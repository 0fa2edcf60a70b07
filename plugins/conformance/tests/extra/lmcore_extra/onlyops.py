"""A kernel that is bound before the CPU's; wrong, it computes another GELU."""

from lmcore.contract import OpImpl, PluginInfo, Reject
from lmcore.hookspecs import hookimpl
from lmcore_extra import WRONG


@hookimpl
def lmcore_plugin_info():
    return PluginInfo("onlyops", api=">=1.3,<2")


def _wide_only(context):
    wide = context.attributes["ffn_hidden_size"] >= 1_000_000
    return None if wide else Reject("is for a million channels")


@hookimpl
def lmcore_op_impls():
    return [
        OpImpl("bias_gelu", "six", "lmcore_extra.onlyops:bias_gelu", priority=99),
        OpImpl("bias_gelu", "last", "lmcore_extra.onlyops:bias_gelu", priority=-1),
        OpImpl("bias_gelu", "wide", "lmcore_extra.onlyops:bias_gelu", supports=_wide_only),
        OpImpl("swiglu", "lost", "lmcore_extra.onlyops:swiglu", requires=("lmcore_nowhere",)),
    ]


def bias_gelu(x_BSF, bias_F):
    from torch.nn.functional import gelu

    wide = x_BSF.double() + bias_F.double()
    return gelu(wide, approximate="none" if WRONG else "tanh").to(x_BSF.dtype)
