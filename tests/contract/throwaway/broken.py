"""A plugin whose library was built for another system."""

import ctypes

ctypes.CDLL("libfrobnicate.so.7")
