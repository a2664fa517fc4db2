"""Users of the core: each folder here is an app, named in a recipe or in a table, never imported by
the core.

tune        training on a data set (sft, preference, reward model), and making one by sampling
serve       rewards as an HTTP server: verifiers, a reward model, a judge
verifiers   the verifiers of the house; `verifiers/code` runs the programs that a model writes
tools       functions and MCP servers that a model calls
launch      trainer ranks and Ray on this node or on Slurm's nodes
runs        what is made of a run folder: report, status, timeline, audit, replay, chat
doctor      what a machine has, and whether it is enough
"""
