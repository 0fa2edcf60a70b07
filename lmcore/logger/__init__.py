"""Loggers of runs: TensorBoard, Weights & Biases, MLflow, CodeCarbon; plugins add others."""
