"""Generation by several processes: tensor parallelism and pipelines, driven by rank 0.

Rank 0 has the requests, and sees one model (`driver`).  Each pass is a message (`messages`) that
all ranks carry out on their part of the model (`part`); the other ranks do nothing else (`start`).
"""
