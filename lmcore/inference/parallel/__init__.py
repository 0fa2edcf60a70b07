"""Generation by several processes: tensor parallelism and pipelines, driven by rank 0.

Rank 0 has the requests, and sees one model (`driver`).  Each pass is a message (`messages`) that
all ranks carry out on their part of the model (`part`); the other ranks do nothing else (`start`).

So everything that uses a `TextModel`, such as batches, beams and evaluation, works on several
processes as it is.  If each rank ran it, the ranks would have to agree in each step on requests
that are cancelled, memory that is missing and texts that end.
"""
