"""Files of settings: YAML as read, a run's own `config.yaml`, and the paths in them."""
