"""The format `npz`: its record, and the hooks that add it.  Torch-free."""

from lmcore.contract import PluginInfo
from lmcore.hookspecs import hookimpl
from lmcore.model.checkpoint_format import CheckpointFormat

MODEL, WEIGHTS = "npz_model.json", "npz_weights.npz"


@hookimpl
def lmcore_plugin_info():
    """Describe the plugin."""
    return PluginInfo(name="npz", api=">=1.3,<2", summary="checkpoints as arrays of numpy")


@hookimpl
def lmcore_add_formats(registry):
    """Add the format."""
    registry.add(NPZ)


NPZ = CheckpointFormat(
    name="npz",
    title="numpy",
    described="a model in arrays of numpy",
    files=f"`{MODEL}` with `{WEIGHTS}`",
    matches=lambda directory: (directory / MODEL).is_file() and (directory / WEIGHTS).is_file(),
    read="lmcore_example_format.npz:NpzState",
    write="lmcore_example_format.npz:write_npz",
)
