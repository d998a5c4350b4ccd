"""The version, where the build reads it without importing torch."""

__version__ = "0.2.0"
