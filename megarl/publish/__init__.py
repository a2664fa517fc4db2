"""The one wire from the trainer to the engines. To add a carrier, see `carrier.py`."""
