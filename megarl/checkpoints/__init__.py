"""Checkpoints: written aside, digested, synced to disk, renamed; read by rank or as a whole."""
