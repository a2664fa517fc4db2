"""The words of the command line: the table of commands, the pages of `--help`, completion of
words.
"""
