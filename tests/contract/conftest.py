"""Fixtures: environments in which a test installs plugins."""

from suite.environment import new_environment, throwaway_environment

__all__ = ["new_environment", "throwaway_environment"]
