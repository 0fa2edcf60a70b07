"""Options as users give them: command-line flags, YAML files and their help."""
