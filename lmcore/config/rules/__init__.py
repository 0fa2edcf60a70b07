"""Validation rules over the sections of a configuration, one file for each subject."""
