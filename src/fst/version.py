"""The version, stated once: the distribution, `fst --version`, data and runs read it."""

__version__ = "0.2.0"
