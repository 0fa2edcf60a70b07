"""Precision policies, and verification that a policy is in force."""
