"""Property tests: no deadline for one example, since a busy machine is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("lmcore", deadline=None)
settings.load_profile("lmcore")
