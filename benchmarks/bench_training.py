"""One training step of the network of examples/mnist_cnn.py: forward, loss, backward and SGD; in one thread; as a graph."""

import sys
from pathlib import Path

import torch

import cupyops
from cupyops.bench import Case

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from mnist_cnn import SimpleCNN


def step_of(nn, optimizer):
    """A function of images and labels that trains a network of its own, made at the first call."""
    made = []

    def step(images, labels):
        if not made:
            model = SimpleCNN(nn).to(images.device)
            made.extend((model, optimizer(model.parameters(), lr=0.01, momentum=0.9), nn.NLLLoss()))
        model, steps, loss = made
        steps.zero_grad()
        value = loss(model(images), labels)
        value.backward()
        steps.step()
        return value.detach()

    return step


LOST = (
    "The host, in Python. At batch 64, in one thread, 47% of the step is forward, 44% backward and 7% the optimizer; to "
    "wake autograd's thread, and what that slows down, takes 300 to 800 us more. The kernels take 150 us, as the row under "
    "a graph shows. At batch 1024 they take 1130, 800 of them those of the second convolution, which multiplications and "
    "additions in fp32 bound."
)


def alone(step):
    """The step with backward in the thread that calls it, and not in the one that autograd has for the GPU."""

    def in_one_thread(images, labels):
        with torch.autograd.set_multithreading_enabled(False):
            return step(images, labels)

    return in_one_thread


def case(batch, want=None, how=None, name=""):
    """Both as they are, or each made another by `how`."""

    def make(device, dtype):
        return torch.rand(batch, 1, 28, 28, device=device), torch.randint(0, 10, (batch,), device=device)

    ours, theirs = step_of(cupyops.nn, cupyops.optim.SGD), step_of(torch.nn, torch.optim.SGD)
    if how is not None:
        ours, theirs = how(ours), how(theirs)
    return Case(
        "training step", f"SimpleCNN, batch {batch}{name}", torch.float32, make,
        ours, theirs, unit="us", want=want, same=False,
        compiled=False, wall=True, lost=LOST,
    )  # fmt: skip


def cases():
    for batch, want in ((64, 450), (1024, 700)):
        yield case(batch, want)
        yield case(batch, how=alone, name=", one thread")
        yield case(batch, how=cupyops.graph, name=", graph")
