"""Parts of `lmcore migrate`: the table of flags, and programs beside training."""
