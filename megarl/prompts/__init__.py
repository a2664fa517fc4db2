"""Prompts and demonstrations: rows of a data set, rendered and tokenised. To add a source, add a reader to READERS in source.py."""
