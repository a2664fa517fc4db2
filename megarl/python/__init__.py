"""What `megarl.api` is made of: the objects that a caller gives a run, and the processes of a
run.
"""
