"""The version, where the build reads it without importing torch."""

__version__ = "0.3.0"
