"""A selective scan: a recurrence whose decay and whose input are chosen anew at each step, by the data itself.

For each channel d and state n, as in Gu and Dao's Mamba (2023):

    h[t, d, n] = exp(delta[t, d] a[d, n]) h[t-1, d, n] + delta[t, d] b[t, n] x[t, d]
    y[t, d]    = sum over n of c[t, n] h[t, d, n]
"""

from contextlib import nullcontext

import torch
from torch import Tensor

import cupyops

CODE = r"""
// Thread d owns channel d with all its states, whose values it leaves in h (steps, channels, states) for backward.
__global__ void scan_fwd(const float* x, const float* delta, const float* a, const float* b, const float* c, float* h,
                         float* y, int steps, int channels, int states) {
  const int d = blockIdx.x * blockDim.x + threadIdx.x;
  if (d >= channels) return;
  for (int t = 0; t < steps; ++t) {
    const long long at = (long long)t * channels + d;
    float sum = 0;
    for (int n = 0; n < states; ++n) {
      const float before = t ? h[(at - channels) * states + n] : 0;
      const float now = expf(delta[at] * a[d * states + n]) * before + delta[at] * b[t * states + n] * x[at];
      h[at * states + n] = now;
      sum += c[t * states + n] * now;
    }
    y[at] = sum;
  }
}

// Thread d owns channel d, backwards in time. The gradient of a state is g[t] = c[t] grad_y[t] + decay[t+1] g[t+1]. What is
// summed over the channels, the gradients of b and c, is left for each channel (steps, channels, states). A gradient that
// nobody wants is null.
__global__ void scan_bwd(const float* grad_y, const float* x, const float* delta, const float* a, const float* b,
                         const float* c, const float* h, float* grad_x, float* grad_delta, float* grad_a, float* parts_b,
                         float* parts_c, int steps, int channels, int states) {
  const int d = blockIdx.x * blockDim.x + threadIdx.x;
  if (d >= channels) return;
  for (int t = 0; t < steps; ++t) {
    if (grad_x) grad_x[t * channels + d] = 0;
    if (grad_delta) grad_delta[t * channels + d] = 0;
  }
  for (int n = 0; n < states; ++n) {
    const float rate = a[d * states + n];
    float g = 0, sum = 0;
    for (int t = steps - 1; t >= 0; --t) {
      const long long at = (long long)t * channels + d;
      const float decay = expf(delta[at] * rate), before = t ? h[(at - channels) * states + n] : 0;
      g += c[t * states + n] * grad_y[at];
      if (grad_x) grad_x[at] += g * delta[at] * b[t * states + n];
      if (grad_delta) grad_delta[at] += g * (rate * decay * before + b[t * states + n] * x[at]);
      sum += g * delta[at] * decay * before;
      if (parts_b) parts_b[at * states + n] = g * delta[at] * x[at];
      if (parts_c) parts_c[at * states + n] = grad_y[at] * h[at * states + n];
      g *= decay;
    }
    if (grad_a) grad_a[d * states + n] = sum;
  }
}
"""
kernels = cupyops.module(CODE)


@cupyops.operator("gallery::scan", dtypes=torch.float32)
def scan(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """y (steps, channels) of x and delta alike, a (channels, states), b and c (steps, states)."""
    h, found = torch.zeros_like(a), []
    for t in range(len(x)):
        h = torch.exp(delta[t, :, None] * a) * h + (delta[t] * x[t])[:, None] * b[t]
        found.append((h * c[t]).sum(1))
    return torch.stack(found) if found else x * delta


@scan.forward
def _(x, delta, a, b, c):
    x, delta, a, b, c = cupyops.contiguous(x, delta, a, b, c)
    y, h = torch.empty_like(x), x.new_empty(*x.shape, a.shape[1])
    kernels.scan_fwd[cupyops.grid_1d(x.shape[1], 64)](x, delta, a, b, c, h, y, *h.shape)
    return y, (h,)


@scan.backward
def _(saved, grad_y, x, delta, a, b, c, needs_grad):
    (h,) = saved
    grad_y, x, delta, a, b, c = cupyops.contiguous(grad_y, x, delta, a, b, c)
    like = {"x": x, "delta": delta, "a": a, "b": h, "c": h}
    grads = [torch.empty_like(one) if getattr(needs_grad, name) else None for name, one in like.items()]
    kernels.scan_bwd[cupyops.grid_1d(x.shape[1], 64)](grad_y, x, delta, a, b, c, h, *grads, *h.shape)
    return *grads[:3], *(None if parts is None else parts.sum(1) for parts in grads[3:])


@scan.unsupported
def _(x, delta, a, b, c):
    if x.dim() != 2 or a.dim() != 2 or delta.shape != x.shape or a.shape[0] != x.shape[1]:
        return "other shapes"
    return None if b.shape == c.shape == (x.shape[0], a.shape[1]) else "other shapes"


def main() -> None:
    """Of noise, only what is marked is to be remembered: when to open the memory, and for how long, is learned."""
    gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    with nullcontext() if gpu else cupyops.simulate():
        device = "cuda" if gpu else "cpu"
        steps = 48
        mark = (torch.arange(steps) % 12 == 3).float().to(device)
        x = torch.randn(steps, 1, device=device)
        held = torch.where(mark.cumsum(0) > 0, x[:, 0][(12 * (mark.cumsum(0) - 1).clamp(0) + 3).long()], 0.0)
        one, rate = torch.ones(steps, 1, device=device), -torch.ones(1, 1, device=device)
        raw = torch.zeros(
            2, device=device, requires_grad=True
        )  # of the time that a step takes, without mark and with it
        optimizer = torch.optim.Adam([raw], lr=0.3)
        for step in range(40):
            delta = torch.nn.functional.softplus(raw[0] + (raw[1] - raw[0]) * mark)[:, None]
            y = scan(x, delta, rate, one, one)
            y = (
                y[:, 0] * (1 - torch.exp(-delta[3])) / delta[3]
            )  # so that a long step takes up what there is, and no more
            loss = (y - held).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (0, 39):
                plain, marked = delta[0].item(), delta[3].item()
                print(f"step {step:2}  error {loss.item():.3f}  a step takes {plain:.2f}, with a mark {marked:.2f}")
        for name, signal in (("noise", x[:, 0]), ("marked", mark), ("held", y.detach())):
            print(f"{name:>6} |{''.join(' .-~=+*#'[min(7, max(0, int(4 + 2 * value)))] for value in signal.tolist())}|")


if __name__ == "__main__":
    main()
