"""The one place of the version: the distribution, `fst --version`, data and runs read it."""

__version__ = "0.1.0"
