"""Stand-in for apex's normalizations: signatures and dtypes of the real ones, sums by torch."""

import torch
from torch.nn import functional


def _through(ctx, function, out_dtype, *inputs):
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = function(*(x.to(out_dtype) for x in leaves))
    ctx.leaves, ctx.out = leaves, out
    return out.detach().clone()


def _back(ctx, grad, others):
    grads = torch.autograd.grad(ctx.out, ctx.leaves, grad)
    return (*grads, *(None,) * others)


class FusedLayerNormAffineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):  # noqa: A002
        assert input.dtype == weight.dtype == bias.dtype

        def norm(x, w, b):
            return functional.layer_norm(x, normalized_shape, w, b, eps)

        return _through(ctx, norm, input.dtype, input, weight, bias)

    @staticmethod
    def backward(ctx, grad_output):
        return _back(ctx, grad_output, 3)


class FusedLayerNormAffineMixedDtypesFunction(FusedLayerNormAffineFunction):
    """The result has the dtype of the gain."""

    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):  # noqa: A002
        def norm(x, w, b):
            return functional.layer_norm(x, normalized_shape, w, b, eps)

        return _through(ctx, norm, weight.dtype, input, weight, bias)


class FusedRMSNormAffineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, normalized_shape, eps, memory_efficient=False):  # noqa: A002
        assert input.dtype == weight.dtype

        def norm(x, w):
            return functional.rms_norm(x, normalized_shape, w, eps)

        return _through(ctx, norm, input.dtype, input, weight)

    @staticmethod
    def backward(ctx, grad_output):
        return _back(ctx, grad_output, 3)


class FusedRMSNormAffineMixedDtypesFunction(FusedRMSNormAffineFunction):
    """The result has the dtype of the gain."""

    @staticmethod
    def forward(ctx, input, weight, normalized_shape, eps, memory_efficient=False):  # noqa: A002
        def norm(x, w):
            return functional.rms_norm(x, normalized_shape, w, eps)

        return _through(ctx, norm, weight.dtype, input, weight)
