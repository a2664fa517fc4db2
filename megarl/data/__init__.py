"""Data: rows of a data set become prompts, demonstrations or preferences, rendered and tokenised.

    rows            files, data sets of the hub and programs -> rows -> values; digests of rows
    forms           the columns of other libraries, in one table
    chats           values that hold chats, and the tools of a row
    reading         rows -> texts -> token ids: what all kinds of data have in common
    order           which row is used as number n
    source          prompts for reinforcement learning
    demonstrations  (prompt, response) pairs for supervised fine-tuning
    preferences     better and worse responses

To add a file format, add a reader to `READERS` in `rows.py`.
"""
