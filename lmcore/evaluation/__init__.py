"""Evaluation of trained models: tasks as records, their examples, and the scores of a model.

A task (`task`) reads examples from files (`files`); `likelihood` computes the log-probabilities
that they ask for; `score` makes metrics of them; `run` does all of it for a checkpoint.
"""
