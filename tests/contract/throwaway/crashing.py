"""A plugin that takes its process down when it is imported."""

import ctypes

ctypes.string_at(0)
