"""Conversion of checkpoints between lmcore and the formats of other programs.

Every format is read as a `ModelState`: weights, and optimizer state if there is any, tensor by
tensor under lmcore's names.  Every format is written from one, so that each format is described
once and any two can be combined.
"""
