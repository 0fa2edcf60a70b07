"""Stand-in for its part for torch, which loads the compiled module from the package's folder."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_NAME = "transformer_engine_torch"
_SPEC = spec_from_file_location(_NAME, Path(__file__).parents[1] / f"{_NAME}.py")
sys.modules[_NAME] = module_from_spec(_SPEC)
_SPEC.loader.exec_module(sys.modules[_NAME])
