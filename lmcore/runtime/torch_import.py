"""Import of torch with the backends that other packages add to it."""

from __future__ import annotations

from typing import Any

from lmcore.base.errors import PluginError
from lmcore.plugin.torch_backends import AUTOLOAD, backend_error, installed_backends

__all__ = ["broken_backend", "import_torch"]

_SECONDS = 120.0


def import_torch() -> None:
    """Import torch.

    Raises:
        PluginError: A backend of another package cannot be loaded.
    """
    try:
        import torch  # noqa: F401
    except Exception as error:
        explained = backend_error(error)
        if explained is None:
            raise
        raise explained from error


def broken_backend() -> PluginError | None:
    """Return the message for the backend that torch cannot load here, or None.

    If there are backends, torch is imported in a separate process.
    """
    backends = installed_backends()
    if not backends:
        return None
    from lmcore.plugin.isolation.subprocess_call import call_isolated  # not for the library

    outcome = call_isolated(f"{__name__}:_problem", timeout=_SECONDS)
    if not outcome.complete:
        return PluginError(
            f"torch with the backends {', '.join(backends)} cannot be imported",
            why=outcome.fault,
            hint=f"set {AUTOLOAD}=0 to use torch without them, or uninstall these packages",
        )
    problem = outcome.value
    return (
        PluginError(problem["what"], why=problem["why"], hint=problem["hint"]) if problem else None
    )


def _problem() -> dict[str, Any] | None:
    """Return what `import_torch` raises about a backend; runs in a separate process."""
    try:
        import_torch()
    except PluginError as error:
        return {"what": error.what, "why": error.why, "hint": error.hint}
    return None
