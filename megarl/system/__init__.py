"""The machine below a run: processes, signals, files, Ray's calls, what each process does."""
