"""Configuration: options, flags, files, presets, provenance, validation and the resolved plan.

`load.load_config` merges the sources, `validate.validate` finds what is wrong, and
`resolve.resolve` derives the rest.  Nothing here imports torch, so that help is instant.
"""
