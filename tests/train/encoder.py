"""`lmcore` with the model family of `layouts/encoder_model.py`; a script.

Usage: encoder.py COMMAND ARGUMENT...
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from layouts import encoder_model

from lmcore.cli.main import main

if __name__ == "__main__":
    encoder_model.register()
    sys.exit(main(sys.argv[1:]))
