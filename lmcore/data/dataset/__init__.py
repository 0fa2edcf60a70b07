"""Datasets of training samples: GPT, BERT, T5 and ICT, and the indices that they read by."""
