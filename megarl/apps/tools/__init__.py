"""Tools that a model calls in the middle of its response: functions and MCP servers, the parsers of
calls, and the session that goes back and forth.
"""
