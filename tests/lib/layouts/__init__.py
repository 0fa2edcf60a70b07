"""Layouts of processes that train the same steps: the cases, who runs them, who compares them."""
