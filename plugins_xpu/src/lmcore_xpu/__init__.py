"""Intel GPUs for lmcore: found through the kernel's device tree, used through `torch.xpu`."""
