"""Datasets of training samples (GPT, BERT, T5, ICT) and their sample indices."""
