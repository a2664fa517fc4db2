"""Dispatch policies: which group may start now, and which groups make up which step."""
