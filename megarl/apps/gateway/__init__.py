"""Agents as programs: an OpenAI-compatible server in front of the engines, which records what it
gives out.
"""
