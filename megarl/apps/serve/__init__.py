"""Verifiers, a reward model or a judge as an HTTP server."""
