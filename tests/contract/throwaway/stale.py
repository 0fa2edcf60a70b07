"""A plugin that was written for the contract before this one."""

from lmcore.contract import PluginInfo
from lmcore.hookspecs import hookimpl


@hookimpl
def lmcore_plugin_info():
    return PluginInfo("stale", api=">=0.3,<1")
