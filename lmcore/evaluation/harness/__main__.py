"""`python -m lmcore.evaluation.harness`: lm-eval-harness's command line with the model `lmcore`."""

from __future__ import annotations

import lmcore.evaluation.harness.model  # noqa: F401 - registers the model

from lm_eval.__main__ import cli_evaluate  # isort: skip - without the package the model says so

if __name__ == "__main__":
    cli_evaluate()
