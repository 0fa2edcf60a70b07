"""The XPU plugin on simulated devices: a plugin of the tests, whose hooks call lmcore-xpu's.

Only the vendor's parts are replaced: facts of the machine, `torch.xpu` (by the module of the
simulated device) and XCCL (by its communication backend).  All else is what runs on a GPU.
"""
