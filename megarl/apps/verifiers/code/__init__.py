"""The verifier `code`: programs that a model wrote, run in a sandbox."""
