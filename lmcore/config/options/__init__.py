"""Options on the command line and in YAML files, and their help."""
