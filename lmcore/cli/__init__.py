"""The command line: `main` and one module per command, each with `run(argv)`.

A command's module is imported only when it is chosen, and imports torch, if at all, inside `run`
after the arguments are found to be right.
"""
