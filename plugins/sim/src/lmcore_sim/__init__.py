"""A simulated accelerator: torch's one device type for others, kept in the host's memory.

A plugin like any third party's: found by its entry point, called through the hooks.  Importing the
package loads no torch; `lmcore_sim.torch_backend` makes the device known to torch.
"""
