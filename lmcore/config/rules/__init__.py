"""Validation rules, one file for each subject; `lmcore.config.validate` runs all of them."""
