"""Store: the keys and values by which the processes of a run find and inform each other.

A server in the launcher, or on rank 0, keeps them; every process is a client.  Both prove that they
have the secret of the run before anything is read, and each message carries a code that only the
secret makes.  Torch-free but for the adapter of process groups.
"""

from lmcore.runtime.store.client import OTHER_SECRET, StoreClient, StoreError
from lmcore.runtime.store.secret import SECRET, local_run_env, new_secret, run_secret
from lmcore.runtime.store.server import StoreServer, serve_in_thread

__all__ = [
    "OTHER_SECRET",
    "SECRET",
    "StoreClient",
    "StoreError",
    "StoreServer",
    "local_run_env",
    "new_secret",
    "run_secret",
    "serve_in_thread",
]
