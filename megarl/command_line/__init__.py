"""The words of the command line: the table of commands, `--help`, completion."""
