"""Output of a run: display, metrics, profiles, samples and the run directory."""
