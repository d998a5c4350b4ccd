"""TSSA written down a second time, plainly and in the order of the paper: what the operator is tested against.

Layout here is head-major, w (B, H, T, p), as in the paper; gradients are closed forms, checked against autograd as well.
"""

import torch


def _masked(w, mask):
    m = torch.ones_like(w[:, 0, :, 0]) if mask is None else mask.to(w.dtype)
    return m, w.square() * m[:, None, :, None]


def causal(w, temp, bias, mask=None):
    """w (B, H, T, p), temp (H,), bias (H, T) or (B, H, T), mask (B, T)."""
    m, s = _masked(w, mask)
    denom = s.cumsum(-2).clamp_min(1e-12)
    bias = bias if bias.ndim == 3 else bias[None]
    score = temp[None, :, None] * (s / denom + bias[..., None]).sum(-1)
    membership = score.softmax(1) * m[:, None]
    dots = (membership[..., None] * s).cumsum(-2) / (membership.cumsum(-1) + 1e-8)[..., None]
    return -(w * membership[..., None]) / (1 + dots), membership


def bidirectional(w, temp, mask=None):
    m, _ = _masked(w, mask)
    w = w * m[:, None, :, None]
    normed = torch.nn.functional.normalize(w, dim=-2, eps=1e-12)
    membership = (temp[None, :, None] * normed.square().sum(-1)).softmax(1) * m[:, None]
    dots = (membership[..., None] * w.square()).sum(-2) / (membership.sum(-1) + 1e-8)[..., None]
    return -(w * membership[..., None]) * (1 / (1 + dots))[:, :, None], membership


def _suffix(x, dim):
    return x.flip(dim).cumsum(dim).flip(dim)


def causal_gradients(w, temp, bias, grad, mask=None):
    """Closed-form gradients (dw, dtemp, dbias (H, T)) of `causal`'s output."""
    m, s = _masked(w, mask)
    total = s.cumsum(-2)
    floored = total.clamp_min(1e-12)
    z = (s / floored).sum(-1) + w.shape[-1] * bias
    soft = (temp[None, :, None] * z).softmax(1)
    pi = soft * m[:, None]
    count = pi.cumsum(-1) + 1e-8
    moment = (s * pi[..., None]).cumsum(-2) / count[..., None]
    a = 1 / (1 + moment)
    dm = grad * w * pi[..., None] * a.square()
    u = _suffix(dm / count[..., None], -2)
    v = _suffix(-(dm * moment).sum(-1) / count, -1)
    dpi = (-(grad * w * a).sum(-1) + (s * u).sum(-1) + v) * m[:, None]
    dscore = soft * (dpi - (soft * dpi).sum(1, keepdim=True))
    q = (temp[None, :, None] * dscore)[..., None]
    tail = _suffix(-q * s / floored.square() * (total >= 1e-12), -2)
    ds = (pi[..., None] * u + q / floored + tail) * m[:, None, :, None]
    return -grad * pi[..., None] * a + 2 * w * ds, (dscore * z).sum((0, 2)), w.shape[-1] * q[..., 0].sum(0)


def bidirectional_gradients(w, temp, grad, mask=None):
    """Closed-form gradients (dw, dtemp) of `bidirectional`'s output."""
    m, s = _masked(w, mask)
    total = s.sum(-2, keepdim=True)
    floored = total.clamp_min(1e-24)
    z = (s / floored).sum(-1)
    soft = (temp[None, :, None] * z).softmax(1)
    pi = soft * m[:, None]
    count = pi.sum(-1, keepdim=True) + 1e-8
    moment = (s * pi[..., None]).sum(-2, keepdim=True) / count[..., None]
    a = 1 / (1 + moment)
    dm = a.square() * (grad * w * pi[..., None]).sum(-2, keepdim=True)
    dn = dm / count[..., None]
    dd = -(dm * moment).sum(-1) / count
    dpi = (-(grad * w * a).sum(-1) + (s * dn).sum(-1) + dd) * m[:, None]
    dscore = soft * (dpi - (soft * dpi).sum(1, keepdim=True))
    q = (temp[None, :, None] * dscore)[..., None]
    tail = -(q * s).sum(-2, keepdim=True) / floored.square() * (total >= 1e-24)
    ds = (pi[..., None] * dn + q / floored + tail) * m[:, None, :, None]
    return -grad * pi[..., None] * a + 2 * w * ds, (dscore * z).sum((0, 2))
