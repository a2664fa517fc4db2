"""Data: rows of a data set become prompts or demonstrations, rendered and tokenised.

To add a file format, add a reader to `READERS` in `rows.py`.
"""
