"""Stand-in for the compiled functions of Transformer Engine 2.8: signatures, sums by torch."""

import torch


def _checked(input, weight, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):  # noqa: A002
    assert input.dim() == 2
    assert input.is_contiguous()
    assert input.dtype == weight.dtype
    assert ln_out is None
    assert quantizer is None
    assert otype == {torch.float32: "kFloat32", torch.bfloat16: "kBFloat16"}[input.dtype]
    assert (sm_margin, zero_centered_gamma) == (0, False)


def layernorm_fwd(
    input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma, /  # noqa: A002
):  # fmt: skip
    _checked(input, weight, ln_out, quantizer, otype, sm_margin, zero_centered_gamma)
    x = input.float()
    mean = x.mean(-1)
    scale = (x.var(-1, correction=0) + eps).rsqrt()
    normal = (x - mean[:, None]) * scale[:, None]
    return [(normal * weight + bias).to(input.dtype), mean, scale]


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma, /):
    normal = (x.float() - mu[:, None]) * rsigma[:, None]
    inner = dz.float() * gamma
    dx = inner - inner.mean(-1, keepdim=True) - normal * (inner * normal).mean(-1, keepdim=True)
    weights = (dz.float() * normal).sum(0), dz.float().sum(0)
    return [(dx * rsigma[:, None]).to(x.dtype), *(one.to(gamma.dtype) for one in weights)]


def rmsnorm_fwd(
    input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma, /  # noqa: A002
):  # fmt: skip
    _checked(input, weight, ln_out, quantizer, otype, sm_margin, zero_centered_gamma)
    x = input.float()
    scale = (x.square().mean(-1) + eps).rsqrt()
    return [(x * scale[:, None] * weight).to(input.dtype), None, scale]


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma, /):
    normal = x.float() * rsigma[:, None]
    inner = dz.float() * gamma
    dx = (inner - normal * (inner * normal).mean(-1, keepdim=True)) * rsigma[:, None]
    return [dx.to(x.dtype), (dz.float() * normal).sum(0).to(gamma.dtype)]
