"""Tasks of EleutherAI's lm-eval-harness with models of lmcore.

The import of `lmcore.evaluation.harness.model` registers the model `lmcore`, so that
`lm_eval.simple_evaluate(model="lmcore", model_args="path=runs/my-run", ...)` finds it.
`python -m lmcore.evaluation.harness` is the command line of lm-eval-harness with that model.
`run` evaluates its tasks for `lmcore evaluate`.
"""
