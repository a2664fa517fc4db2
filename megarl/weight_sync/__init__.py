"""Weight synchronisation: trainer ranks send weights to inference engines.

To add a transport, see `transports/base.py`.
"""
