"""Records in the run folder what each process of a run is doing and which other processes it waits
for; reports waits that take too long.
"""
