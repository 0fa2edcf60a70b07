"""The family `window`: its record, its setting, and the hooks that add both.  Torch-free."""

from dataclasses import dataclass

from lmcore.config.option import CHECKED, option
from lmcore.contract import PluginInfo
from lmcore.hookspecs import hookimpl
from lmcore.model.family import Family, ForwardFlops, Loss
from lmcore.model.parameters import ONES, ZEROS, Init, Parameter, Split


@hookimpl
def lmcore_plugin_info():
    """Describe the plugin."""
    return PluginInfo(name="window", api=">=1.3,<2", summary="language models without attention")


@dataclass(frozen=True)
class WindowSection:
    """Options of the family `window`."""

    width: int = option(
        4, "Number of tokens that a layer mixes.", minimum=1, maximum=64, on_resume=CHECKED
    )


@hookimpl
def lmcore_add_options(registry):
    """Add the setting, `--window-width`."""
    registry.add(WindowSection)


@hookimpl
def lmcore_add_families(registry):
    """Add the family."""
    registry.add(WINDOW)


def parameters(shape):
    """Return the table of parameters: a row for each, in the order of checkpoints."""
    hidden, width, usual = shape.hidden_size, shape.own["window_width"], Init(std=0.02)
    rows = (shape.padded_vocab_size, hidden)
    table = [Parameter("tokens.weight", rows, usual, Split(0), rows_are_tokens=True)]
    for layer in range(shape.num_layers):
        name, wide = f"mixers.{layer}", (shape.ffn_hidden_size, hidden)
        table += [
            Parameter(f"{name}.taps", (width, hidden), Init(std=0.3)),
            Parameter(f"{name}.norm.weight", (hidden,), ONES),
            Parameter(f"{name}.norm.bias", (hidden,), ZEROS),
            Parameter(f"{name}.up.weight", wide, usual, Split(0)),
            Parameter(f"{name}.down.weight", wide[::-1], usual, Split(1)),
        ]
    tied = {"rows_are_tokens": True, "tied_to": "tokens.weight"}
    return [*table, Parameter("head.weight", rows, usual, Split(0), **tied)]


def forward_flops(shape, seq_length):
    """Return the operations of the forward pass of a sample."""
    layer = 2 * shape.hidden_size * (shape.own["window_width"] + 2 * shape.ffn_hidden_size)
    head = 2 * shape.hidden_size * shape.padded_vocab_size
    return ForwardFlops(seq_length * shape.num_layers * layer, seq_length * head)


WINDOW = Family(
    name="Window",
    matches=None,
    parameters=parameters,
    forward_flops=forward_flops,
    batch=dict.fromkeys(("tokens_BS", "targets_BS", "loss_weight_BS"), "BS"),
    losses=(Loss("lm loss", "loss_weight_BS"),),
    model="lmcore_example_family.model:WindowModel",
    samples="lmcore.families.gpt.samples:samples",
    settings={"window_width": 4},
    every_position_is_a_target=True,
)
