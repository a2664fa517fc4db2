"""What `megarl.api` is made of: the objects that a caller gives a run, and the processes of a run.

inputs   functions and rows of the caller -> files of the run folder, named in the recipe
process  a command in a process of its own, the files that it writes; engines that stay
"""
