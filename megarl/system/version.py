"""The version of megarl, below every package that tells it; setup.py reads it from here."""

__version__ = "0.1.0"
