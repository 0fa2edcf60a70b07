"""The checks themselves, a module for each subject."""
