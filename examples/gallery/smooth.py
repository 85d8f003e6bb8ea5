"""A recurrence: s[t] = decay * s[t-1] + (1 - decay) * x[t], for each channel; its gradient runs backwards in time."""

from contextlib import nullcontext

import torch
from torch import Tensor

import cupyops

CODE = r"""
// Thread c owns channel c, and goes through it in order.
__global__ void smooth_fwd(const float* x, const float* decay, float* y, int steps, int channels) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= channels) return;
  float s = 0;
  for (int t = 0; t < steps; ++t) y[t * channels + c] = s = decay[c] * s + (1 - decay[c]) * x[t * channels + c];
}

// The state's gradient g[t] = grad_y[t] + decay * g[t+1]; then grad_x = (1 - decay) * g, and grad_decay the sum over t of
// g[t] * (s[t-1] - x[t]). y is s. A gradient that nobody wants is null.
__global__ void smooth_bwd(const float* grad_y, const float* x, const float* y, const float* decay, float* grad_x,
                           float* grad_decay, int steps, int channels) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= channels) return;
  float g = 0, sum = 0;
  for (int t = steps - 1; t >= 0; --t) {
    const int i = t * channels + c;
    g = grad_y[i] + decay[c] * g;
    if (grad_x) grad_x[i] = (1 - decay[c]) * g;
    sum += g * ((t ? y[i - channels] : 0) - x[i]);
  }
  if (grad_decay) grad_decay[c] = sum;
}
"""
kernels = cupyops.module(CODE)


@cupyops.operator("gallery::smooth")
def smooth(x: Tensor, decay: Tensor) -> Tensor:
    """The running average of x (steps, channels), with a decay for each channel."""
    s, found = torch.zeros_like(x[0]) if len(x) else x.new_zeros(x.shape[1:]), []
    for row in x:
        s = decay * s + (1 - decay) * row
        found.append(s)
    return torch.stack(found) if found else x * decay


@smooth.forward
def _(x, decay):
    x, decay = cupyops.contiguous(x, decay)
    y = torch.empty_like(x)
    kernels.smooth_fwd[cupyops.grid_1d(x.shape[1], 64)](x, decay, y, *x.shape)
    return y, ()


@smooth.backward
def _(saved, grad_y, x, decay, y, needs_grad):
    grad_y, x, y, decay = cupyops.contiguous(grad_y, x, y, decay)
    grad_x = torch.empty_like(x) if needs_grad.x else None
    grad_decay = torch.empty_like(decay) if needs_grad.decay else None
    kernels.smooth_bwd[cupyops.grid_1d(x.shape[1], 64)](grad_y, x, y, decay, grad_x, grad_decay, *x.shape)
    return grad_x, grad_decay


@smooth.unsupported
def _(x, decay):
    return None if x.dim() == 2 and decay.shape == x.shape[1:] and x.dtype is decay.dtype else "other shapes"


def main() -> None:
    """Two noisy signals, a slow one and a fast one: which running average foretells the next value best?"""
    gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    with nullcontext() if gpu else cupyops.simulate():
        device = "cuda" if gpu else "cpu"
        t = torch.arange(64.0, device=device)
        clean = torch.stack([torch.sin(t / 20), torch.sign(torch.sin(t / 3))], 1)
        x = clean + 0.3 * torch.randn(64, 2, device=device)
        raw = torch.zeros(2, device=device, requires_grad=True)
        optimizer = torch.optim.Adam([raw], lr=0.1)
        for step in range(40):
            y = smooth(x, raw.sigmoid())
            loss = (y[:-1] - x[1:]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (0, 39):
                slow, fast = raw.sigmoid().tolist()
                print(
                    f"step {step:2}  error {loss.item():.3f}  decay {slow:.2f} of the slow signal, {fast:.2f} of the fast"
                )
        for name, signal in (("noisy", x), ("smooth", smooth(x, raw.sigmoid()).detach())):
            marks = [" .-~=+*#"[min(7, max(0, int(4 + 3 * value)))] for value in signal[:, 0].tolist()]
            print(f"{name:>6} |{''.join(marks)}|")


if __name__ == "__main__":
    main()
