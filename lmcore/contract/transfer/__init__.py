"""Copies between a device and the host, made while the device keeps computing."""
