"""Stand-in for Transformer Engine 2.8: its names of dtypes."""

import torch

TE_DType = {torch.float32: "kFloat32", torch.bfloat16: "kBFloat16", torch.float16: "kFloat16"}
