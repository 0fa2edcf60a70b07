"""Jobs of `lmcore launch`: scripts and manifests that start the processes of a command."""
