"""Help of commands that take all options of a run."""

from __future__ import annotations

from lmcore.config.continued import CONTINUE_OPTION
from lmcore.config.option import options_of
from lmcore.config.options.help import Group, render_help
from lmcore.config.plugin_section import NO_PLUGINS, PluginSections, summary_of
from lmcore.config.preset import PRESET_OPTION, PRESETS
from lmcore.config.section import SECTIONS

__all__ = ["render_run_help"]


def render_run_help(
    command: str, summary: str, *, plugins: PluginSections = NO_PLUGINS, epilog: str = ""
) -> str:
    """Return the help of *command*, which takes YAML files and the flags of every section.

    Args:
        command: The command as typed: "lmcore train".
        summary: Summary of the command, one line.
        plugins: Sections that plugins add, each a separate group.
        epilog: Text printed below the options, before the presets.
    """
    groups: list[Group] = [("start from", "", (PRESET_OPTION, CONTINUE_OPTION))]
    for name, section in SECTIONS.items():
        groups.append((name, summary_of(section), options_of(section, name=name)))
    groups += plugins.groups()
    names = [f"  {preset.name:<16}{preset.summary}" for preset in PRESETS.values()]
    presets = "\n".join(["presets:", *names])
    return render_help(
        command,
        summary,
        groups,
        usage="[config.yaml ...] [--flags]",
        positionals=[
            ("config.yaml", "Settings by section; flags override them, later files earlier ones.")
        ],
        epilog="\n\n".join(part for part in (epilog, presets) if part),
    )
