"""A trained model for use: loaded from any format, whole or in parts on several processes."""
