"""Data: rows of a data set become prompts or demonstrations, rendered and tokenised.

rows            files and data sets of the hub -> rows
render, tokens  a row's columns -> texts -> token ids
order           which row is used as number n
fingerprint     digest of the rows that are used, for checkpoints
source          prompts for reinforcement learning
demonstrations  (prompt, response) pairs for supervised fine-tuning

To add a file format, add a reader to `READERS` in `rows.py`.
"""
