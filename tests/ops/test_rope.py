import pytest
import torch
from contract import Make, OperatorContract, Sample

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu, gpu
from cupyops._dispatch.rope import Problem, Staged


def by_torch(input, cos, sin, positions=None, *, interleaved=False, seq_dim=-2):
    """The pairs as complex numbers, each multiplied by cos + i sin."""
    moved = input.movedim(seq_dim, 0)  # (seq, batch, ..., head_dim)
    if positions is not None and positions.device.type == "cpu" and (positions < 0).any():
        raise IndexError("a position is negative")  # which indexing would count from the end
    if 2 * cos.shape[-1] > input.shape[-1]:
        raise IndexError("tables of more than half of head_dim")  # which broadcast against fewer pairs
    if cos.shape[0] < (1 if positions is not None else moved.shape[0]):
        raise IndexError("fewer rows of the tables than positions")  # which ends the process on a GPU
    if positions is None:
        positions = torch.arange(moved.shape[0], device=input.device)
    angles = torch.complex(*(t.to(torch.promote_types(input.dtype, torch.float32)) for t in (cos, sin)))
    angles = angles[positions.long()]  # (seq, pairs) or (batch, seq, pairs)
    if positions.dim() == 2:
        angles = angles.transpose(0, 1)
    shape = (*angles.shape[:-1], *(1,) * (moved.dim() - angles.dim()), angles.shape[-1])
    rotary = 2 * cos.shape[-1]
    turned = moved[..., :rotary]
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    pairs = pairs.to(torch.promote_types(input.dtype, torch.float32)).contiguous()
    y = torch.view_as_real(torch.view_as_complex(pairs) * angles.reshape(shape))
    y = (y if interleaved else y.transpose(-1, -2)).flatten(-2).to(input.dtype)
    return torch.cat((y, moved[..., rotary:]), -1).movedim(0, seq_dim).contiguous()


def tables(make: Make, positions: int, pairs: int):
    angles = make(positions, pairs, low=-3.0, high=3.0).detach().double()
    return angles.cos().to(make.dtype), angles.sin().to(make.dtype)


class TestRope(OperatorContract):
    function = staticmethod(cupyops.rope)
    torch_function = staticmethod(by_torch)
    kernels = {"rope_rows", "rope_even", "rope_heads", "rope_staged"}

    def samples(self, make: Make):
        for interleaved in (False, True):
            for size in (7, 6, 12, 24):  # single elements, two at once, four; in the wider dtypes vectors
                x = make(2, 6, 5, size).detach()[:, ::2].requires_grad_()  # rows are apart
                yield Sample(x, *tables(make, 5, size // 2), interleaved=interleaved)
            # vectors, partial
            yield Sample(make(2, 5, 3, 48), *tables(make, 9, 16), interleaved=interleaved, seq_dim=-3)
            for size, pairs in ((6, 3), (71, 31)):  # they are not; several blocks
                yield Sample(make(5, 13, size), *tables(make, 13, pairs), interleaved=interleaved)
        yield Sample(make(2, 5, 3, 32), *tables(make, 9, 16), make.integers(2, 5, high=9), seq_dim=1)
        yield Sample(make(7, 16), *tables(make, 8, 8))  # evenly spaced
        yield Sample(make(1, 300, 16), *tables(make, 2, 8), seq_dim=0)  # of one position, several blocks
        yield Sample(make(7, 16), *tables(make, 8, 8), make.integers(7, high=8))
        yield Sample(make(2, 7, 4), *tables(make, 8, 1), make.integers(2, 7, high=8).int())
        yield Sample(make(2, 0, 4), *tables(make, 8, 1))

    def small_samples(self, make: Make):
        yield Sample(make(2, 3, 6), *tables(make, 3, 2), interleaved=True)
        yield Sample(make(3, 16), *tables(make, 5, 8))

    def layouts(self, make: Make):
        for sample in self.samples(make):
            x, *rest = sample.args
            yield Sample(
                x.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_(), *rest, **sample.kwargs
            )
        packed = make(2, 5, 3, 4, 16)
        for part in (packed[:, :, 1], packed[:, :, 2].transpose(1, 2)):  # heads of a packed projection, transposed
            seq_dim = 1 if part.shape[1] == 5 else 2
            yield Sample(part, *tables(make, 5, 8), seq_dim=seq_dim)
        cos, sin = tables(make, 10, 16)
        yield Sample(make(5, 33)[:, 1:], cos[::2], sin[::2])
        for shape, interleaved in (((2, 5, 32), False), ((9, 32), False), ((2, 3, 5, 32), True), ((3, 7, 16), False)):
            half = shape[-1] // 2  # of tables that have each column twice, of wider ones, of one row for all positions
            yield Sample(make(*shape), cos[:, :half], sin[:, :half], interleaved=interleaved)
            odd = torch.nn.functional.pad(cos, (0, 1))[:, :half], torch.nn.functional.pad(sin, (0, 1))[:, :half]
            yield Sample(make(*shape), *odd, interleaved=interleaved)
            yield Sample(make(*shape), *(t[:1, :half].expand(9, -1) for t in (cos, sin)), interleaved=interleaved)


@pytest.mark.parametrize("shape, seq_dim", [((2, 19, 5, 48), -2), ((3, 5, 19, 48), -3), ((2, 19, 5, 38), -2)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_several_heads_a_thread(shape, seq_dim, interleaved):
    """As of large tensors: a thread keeps the angle of a position for some of its heads, of which not all are as many."""
    make = Make("cpu", torch.float32)
    x, positions = make(*shape).detach(), make.integers(shape[0], shape[seq_dim], high=9)
    for pairs in (shape[-1] // 2, shape[-1] // 4):
        for chosen in (None, positions[0], positions):
            args = (x, *tables(make, 9, pairs), chosen)
            kwargs = {"interleaved": interleaved, "seq_dim": seq_dim}
            with cupyops.simulate(), cupyops.use_form("rope:heads"), assume_gpu(multiprocessors=1, threads=1):
                y = cupyops.rope(*args, **kwargs)
            torch.testing.assert_close(y, by_torch(*args, **kwargs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_several_runs_a_block(interleaved, dtype):
    """As of large tensors: a block turns the same positions of several heads, the last of which are fewer; two tiles."""
    make = Make("cpu", dtype)
    x, cos, sin = make(11, 300, 7).detach(), *tables(make, 300, 3)
    y, problem = torch.empty_like(x), Problem(x.shape, x.stride(), 1, None, 3, 3, 1, interleaved, dtype)
    launch = Staged(blocks=2).launch(problem, gpu(x.device))
    with cupyops.simulate():
        launch(x, cos, sin, None, y, 300, 3, False)
    assert launch.grid == 6
    torch.testing.assert_close(y, by_torch(x, cos, sin, interleaved=interleaved))


def test_interleaved_is_a_permutation(device):
    """The two conventions are one, up to the order of the elements."""
    x = torch.randn(2, 5, 12, device=device)
    cos, sin = (t.to(device) for t in tables(Make("cpu", torch.float32), 5, 6))
    order = torch.arange(12, device=device).view(6, 2).t().flatten()
    neighbours = cupyops.rope(x, cos, sin, interleaved=True)
    assert torch.equal(cupyops.rope(x[..., order], cos, sin), neighbours[..., order])


def test_learned_tables(device):
    x, cos, sin = (torch.randn(s, device=device, requires_grad=True) for s in ((2, 4, 6), (4, 3), (4, 3)))
    results = [f(x, cos, sin) for f in (cupyops.rope, by_torch)]
    grad_y = torch.randn_like(x)
    ours, theirs = (torch.autograd.grad(y, (x, cos, sin), grad_y) for y in results)
    torch.testing.assert_close(ours, theirs)


def test_a_position_out_of_range_stops_the_kernel(capsys):
    cos, sin = torch.ones(4, 1), torch.zeros(4, 1)
    with cupyops.simulate(), pytest.raises(cupyops.SimulatorError, match=r"trap|Trap"):
        cupyops.rope(torch.ones(2, 2), cos, sin, torch.tensor([0, 4]))
    assert "positions, element 1, is 4, expected one in [0, 4)" in capsys.readouterr().out


X, COS = torch.ones(2, 3, 4), torch.ones(3, 2)
BAD = [
    ((None, COS, COS), {}, "input"),
    ((torch.ones(4), COS, COS), {}, "input"),
    ((X, 1.0, COS), {}, "cos"),
    ((X, torch.ones(3, 3), COS), {}, "cos .*at most 2"),
    ((X, torch.ones(2, 2), torch.ones(2, 2)), {}, "cos .*at least 3 rows"),
    ((X, COS, torch.ones(3, 1)), {}, "sin .*the shape of cos"),
    ((X, COS, COS.to("meta")), {}, "sin is on meta"),
    ((X, COS, COS, torch.ones(3)), {}, "positions .*integers"),
    ((X, COS, COS, torch.zeros(2, dtype=torch.long)), {}, "positions .*shape"),
    ((X, COS, COS), {"seq_dim": -1}, "seq_dim"),
    ((X, COS, COS), {"seq_dim": 3}, "seq_dim"),
]


@pytest.mark.parametrize(("args", "kwargs", "culprit"), BAD, ids=str)
def test_bad_input(args, kwargs, culprit):
    with pytest.raises(cupyops.InputError, match=culprit):
        cupyops.rope(*args, **kwargs)
