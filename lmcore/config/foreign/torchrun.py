"""Flags of torchrun for `lmcore run`, which starts the processes of one host."""

from __future__ import annotations

from lmcore.config.options.command_line import ForeignFlag, Translation, UnsupportedFlagError

__all__ = ["torchrun_flags"]

_HOSTS = (
    *("--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
    *("--master-addr", "--master-port", "--local-addr"),
)
_ONE_HOST = {
    ("--nnodes", "1"),
    ("--nnodes", "1:1"),
    ("--node-rank", "0"),
    ("--rdzv-backend", "c10d"),
    ("--max-restarts", "0"),
}
"""Flags and values that ask for what `lmcore run` does."""


def torchrun_flags() -> dict[str, ForeignFlag]:
    """Return the flags of torchrun that have no equivalent in `lmcore run`, by name."""
    return {
        "--standalone": ForeignFlag(
            "0", lambda _: Translation(no_effect="the processes of one host find each other")
        ),
        **{name: _flag(name) for name in (*_HOSTS, "--max-restarts")},
    }


def _flag(name: str) -> ForeignFlag:
    def translate(values: tuple[str, ...]) -> Translation:
        if (name, *values) in _ONE_HOST:
            return Translation(no_effect="`lmcore run` does nothing else")
        if name == "--max-restarts":
            why = "processes that fail are not restarted"
            hint = "leave it out, and restart the command: the script loads its last checkpoint"
        else:
            why = "`lmcore run` starts the processes of this host, which find each other"
            hint = "leave it out on one host; on several use torchrun, or srun with `lmcore run`"
        text = f"`{' '.join((name, *values))}` is not supported"
        return Translation(problem=UnsupportedFlagError(text, why=why, hint=hint))

    return ForeignFlag("1", translate)
