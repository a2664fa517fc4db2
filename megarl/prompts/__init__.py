"""Prompts and demonstrations: rows of a data set, rendered and tokenised. To add a format, add a reader to READERS in rows.py."""
