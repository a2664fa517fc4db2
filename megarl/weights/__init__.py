"""Weight synchronisation: send the trainer's weights to the inference engines after each step.

`publisher.py` is the trainer's side, `receiver.py` the engine's (vLLM). `transports/base.py` says
how to add a transport.
"""
