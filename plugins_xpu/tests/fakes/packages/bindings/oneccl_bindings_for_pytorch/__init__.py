"""Stand-in of oneCCL's bindings: its import makes `ccl` known to torch."""

from torch.distributed import Backend

Backend.CCL = "ccl"
