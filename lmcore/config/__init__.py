"""Configuration: options, flags, files, presets, provenance, validation and the resolved plan.

`load.load_config` merges flags, files and preset, `validate.validate` checks the settings against
each other, and `resolve.resolve` derives the plan of the run.  Nothing here imports torch, so that
help is instant.
"""
