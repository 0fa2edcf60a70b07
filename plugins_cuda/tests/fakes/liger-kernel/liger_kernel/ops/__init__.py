"""Stand-in for liger-kernel 0.8.5: signatures, dtypes and side effects of the real ones."""

import torch
from torch.nn import functional


def _through(ctx, function, dtype, *inputs):
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = function(*leaves)
    ctx.leaves, ctx.out = leaves, out
    return out.detach().to(dtype)


class LigerRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        assert casting_mode == "gemma"
        ctx.in_place = in_place

        def norm(x, w):
            return functional.rms_norm(x.float(), w.shape, w.float() + offset, eps)

        return _through(ctx, norm, X.dtype, X, W)

    @staticmethod
    def backward(ctx, dY):
        grads = torch.autograd.grad(ctx.out, ctx.leaves, dY.to(ctx.out.dtype))
        if ctx.in_place:
            dY.zero_()  # what was there is lost
        return (*grads, None, None, None, None, None)


class LigerLayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, W, B, eps):
        def norm(x, w, b):
            return functional.layer_norm(x.float(), w.shape, w.float(), b.float(), eps)

        return _through(ctx, norm, X.dtype, X, W, B)

    @staticmethod
    def backward(ctx, dY):
        return (*torch.autograd.grad(ctx.out, ctx.leaves, dY.to(ctx.out.dtype)), None)


class LigerFusedGateUpSiLUMulFunction(torch.autograd.Function):
    """Takes gate and up in one tensor; its gradient has two dims, whatever its input has."""

    @staticmethod
    def forward(ctx, y, in_place=False):
        def product(x):
            gate, up = x.float().chunk(2, dim=-1)
            return functional.silu(gate) * up

        return _through(ctx, product, y.dtype, y)

    @staticmethod
    def backward(ctx, dc):
        (grad,) = torch.autograd.grad(ctx.out, ctx.leaves, dc.to(ctx.out.dtype))
        return grad.view(-1, grad.shape[-1]), None


class LigerCrossEntropyFunction(torch.autograd.Function):
    """Writes the gradient over the logits that it is given."""

    @staticmethod
    def forward(
        ctx,
        _input,
        target,
        weight,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
    ):
        assert reduction == "none"
        logits = _input.float()
        loss = functional.cross_entropy(logits, target, reduction="none", ignore_index=ignore_index)
        grad = logits.softmax(-1) - functional.one_hot(target, logits.shape[-1])
        _input.data.copy_(grad)
        ctx.save_for_backward(_input.detach())
        return loss.to(_input.dtype), None, None, None

    @staticmethod
    def backward(ctx, grad_output, *rest):
        (saved,) = ctx.saved_tensors
        return (saved * grad_output.unsqueeze(1), *(None,) * 10)


class LigerFusedLinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        _input,
        weight,
        target,
        bias=None,
        ce_weight=None,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        accum_dtype=None,
        use_token_scaling=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
        ce_impl=None,
        ce_mode=None,
        chunk_mem_const=1,
    ):
        assert reduction == "none"
        assert bias is None
        assert ce_weight is None
        assert _input.dtype == weight.dtype

        def loss(x, w):
            return functional.cross_entropy((x @ w.t()).float(), target, reduction="none")

        return _through(ctx, loss, torch.float32, _input, weight), None, None, None

    @staticmethod
    def backward(ctx, grad_output, *rest):
        return (*torch.autograd.grad(ctx.out, ctx.leaves, grad_output), *(None,) * 16)
