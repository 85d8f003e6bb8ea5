"""What softmax and log_softmax are held to beside the contract of every operator: the same, each with its functions."""

import warnings

import numpy as np
import pytest
import torch
from contract import DTYPES, Make, OperatorContract, Sample, assert_as_good_as_torch

import cupyops
from cupyops.testing import assume_gpu

NAN, INF = float("nan"), float("inf")
FORMS = ("tiny_rows", "sub_warp", "block", "persistent", "two_pass")
KERNELS = {f"softmax_{direction}_{form}" for direction in ("fwd", "bwd") for form in FORMS}

# each form and way of the kernels: tiny rows of one thread and of several, one vector a thread and several, a block for a
# row, rows too long for registers, and columns
SHAPES = [
    ((6, 7), 1), ((6, 61), 1), ((6, 64), 1), ((6, 300), 1), ((6, 1024), 1), ((6, 1031), 1), ((6, 32773), 1),
    ((6, 32776), 1), ((6, 13, 3), 1),
]  # fmt: skip


LITTLE = {"shared": 24000, "shared_total": 25024}  # bytes of shared memory, of which a block has nearly all
SHARED = {"shared": 60000, "shared_total": 61440}  # of which two blocks of 512 threads find enough for short rows


def form_cases(dtype, clusters=True):
    """(form, shape, dim, dtype of the result, properties of the GPU): every instance, and where rows begin and end; with
    `clusters` also rows that several blocks share."""
    widths = (None, torch.float32) if dtype in (torch.float16, torch.bfloat16) else (None,)
    for to in widths:
        for shape, dim in [((6, 7), 1), ((6, 64), 1), ((2, 300), 1), ((3, 1031), 1), ((3, 9001), 1)]:
            yield "two_pass", shape, dim, to, {}
        for shape, dim in [((2, 13, 3), 1), ((3, 40, 8), 1), ((11, 256), 0), ((1, 300), 0)]:
            yield "two_pass", shape, dim, to, {}
    if dtype is torch.float64:
        return
    for to in widths:
        for size in (8, 13, 64, 300, 1024, 1031, 4104):
            yield "block", (5, size), 1, to, {}
    for size in (1, 4, 7, 64, 69, 100):
        yield "sub_warp", (37, size), 1, None, {}
        yield "tiny_rows", (37, size), 1, None, {}
    yield "tiny_rows", (4200, 3), 1, None, {"multiprocessors": 1}  # a block takes more rows than it has threads for
    factor = 2 / dtype.itemsize
    kept = [(3, 3000, SHARED), (3, 4096, LITTLE), (5, 10001, LITTLE), (3, 30001, LITTLE)]
    for rows, size, gpu in kept if clusters else kept[:2]:
        yield "persistent", (rows, int(size * factor)), 1, None, gpu


def gradient(function, x, dim, grad_y, **options):
    x = x.detach().requires_grad_()
    y = function(x, dim, **options)
    return y, *torch.autograd.grad(y, x, grad_y.to(y.dtype))


class SoftmaxContract(OperatorContract):
    """Subclass it with the two functions and the kernels."""

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield from (Sample(make(rows, size), dim=1) for rows, size in ((270, 3), (270, 17), (70, 69)))  # tiny rows
        yield Sample(make(37, 64), 1)  # several blocks
        yield Sample(make(3, 300), -1)
        yield Sample(make(3, 1024 // make.dtype.itemsize - 1), -1)  # off 16 bytes the last tile has part of a pack
        yield Sample(make(3, 1024), -1)
        yield Sample(make(2, 1031), 1)
        long = 65536 // make.dtype.itemsize  # too long for registers
        yield Sample(make(1, long + 5), dim=-1)
        yield Sample(make(1, long + 8), dim=-1)  # of whole vectors
        if make.device.type == "cuda":  # too long for a cluster; in the simulator a form is asked for by name
            yield Sample(make(1, (1 << 21) // make.dtype.itemsize + 8), dim=-1)
        yield Sample(make(33, 40, 2), 1)
        yield Sample(make(300, 7), 0)
        yield Sample(make(0, 3), dim=1)
        yield Sample(make(3, 0), dim=1)
        yield Sample(make(2, 0, 3), dim=0)

    def small_samples(self, make: Make):
        yield Sample(make(3, 5), dim=1)
        yield Sample(make(3, 5), 0)
        yield Sample(make(2, 3, 4), dim=-2)
        yield Sample(make(), dim=0)
        yield Sample(make(4), -1)
        yield Sample(make(3, 1), dim=1)

    def layouts(self, make: Make):
        yield from super().layouts(make)
        for dim in range(4):
            x = make(2, 3, 4, 5).detach().to(memory_format=torch.channels_last)
            yield Sample(x.requires_grad_(), dim=dim)
        for size in (5, 1024 // make.dtype.itemsize - 1):
            yield Sample(make(4, size).detach()[1:].requires_grad_(), dim=1)  # rows off 16 bytes, the first of them too

    @pytest.mark.parametrize(("shape", "dim"), SHAPES)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_special_values(self, device, dtype, shape, dim):
        x = torch.randn(shape).to(device, dtype)
        x[0].select(dim - 1, 3)[...] = NAN
        x[1].select(dim - 1, 4)[...] = INF
        x[2] = -INF
        x[3].select(dim - 1, 5)[...] = -INF
        x[4].narrow(dim - 1, 0, 6)[...] = -INF
        x[5] = x[5] * 60 - 30000
        x[5].select(dim - 1, 6)[...] = -INF
        grad_y = torch.randn_like(x)
        ours = gradient(self.function, x, dim, grad_y)
        theirs = gradient(self.torch_function, x, dim, grad_y)
        truth = gradient(self.torch_function, x.double(), dim, grad_y)
        assert ours[0][:3].isnan().all()
        for row in (slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 6)):
            for a, b, c, what in zip(ours, theirs, truth, ("y", "grad_x")):
                if dtype == torch.float64:
                    torch.testing.assert_close(a[row], b[row], rtol=1e-13, atol=1e-13, equal_nan=True)
                else:
                    assert_as_good_as_torch(a[row], b[row], c[row], f"{what}[{row}]")

    @pytest.mark.parametrize(("shape", "dim"), SHAPES)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_half_in_float_out(self, device, dtype, shape, dim):
        """dtype=torch.float32 casts in the kernel: y as from float32, the gradient of the input's dtype."""
        x, grad_y = torch.randn(shape).to(device, dtype), torch.randn(shape, device=device)
        y, grad_x = gradient(self.function, x, dim, grad_y, dtype=torch.float32)
        theirs, _ = gradient(self.torch_function, x.float(), dim, grad_y)
        truth, best = gradient(self.torch_function, x.double(), dim, grad_y)
        assert y.dtype == torch.float32 and grad_x.dtype == dtype
        assert_as_good_as_torch(y, theirs, truth, "y")
        assert_as_good_as_torch(grad_x, best.to(dtype), best, "grad_x")
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (again,) = torch.autograd.grad(self.function(leaf, dim, torch.float32), leaf, grad_y, create_graph=True)
        torch.testing.assert_close(again.detach(), grad_x)

    def check_form(self, dtype, form, shape, dim, to, gpu):
        """A form that is asked for, on aligned and on misaligned tensors."""
        x = torch.randn(shape).to(dtype)
        misaligned = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(shape)
        with assume_gpu(**gpu), cupyops.use_form(f"{self.function.__name__}:{form}"):
            for given in (x, misaligned) if form != "block" else (x,):
                options = {} if to is None else {"dtype": to}
                self.compare(Sample(given.requires_grad_(), dim, **options), f"{form}, {shape}, {to}")

    @pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool], ids=str)
    @pytest.mark.parametrize("to", DTYPES, ids=str)
    def test_dtype(self, device, dtype, to):
        x = (3 * torch.randn(4, 6)).to(device, dtype)
        y = self.function(x, 1, dtype=to)
        theirs = self.torch_function(x, 1, dtype=to)
        assert_as_good_as_torch(y, theirs, self.torch_function(x.to(to).double(), 1), "y")
        if dtype.is_floating_point:
            leaf = x.clone().requires_grad_()
            self.function(leaf, 1, dtype=to)[:, 0].sum().backward()
            assert leaf.grad.dtype == dtype

    @pytest.mark.parametrize(("shape", "dim"), [((70001, 3), 1), ((70001, 3, 1), 1), ((70001, 2, 3), 1)])
    def test_many_rows(self, device, shape, dim):
        """More rows than a grid's y or z may have, and than the grid's x is given: blocks stride."""
        x = torch.randn(shape, device=device)
        for ours, theirs in zip(
            gradient(self.function, x, dim, x), gradient(self.torch_function, x, dim, x), strict=True
        ):
            torch.testing.assert_close(ours, theirs)

    @pytest.mark.gpu
    @pytest.mark.parametrize("shape", [(2**20 + 1, 2049), (3, 2**30), (2, 2**29 + 1, 2)], ids=str)
    def test_more_than_2_31_elements(self, shape):
        needed = 5 * 2 * np.prod(shape, dtype=np.int64)
        if torch.cuda.get_device_properties(0).total_memory < needed:
            pytest.skip(f"the GPU has less than {needed / 2**30:.0f} GiB")
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
        y = self.function(x, 1)
        last = x[-1:].detach().clone().requires_grad_()
        expected = self.torch_function(last, 1)
        torch.testing.assert_close(y[-1:], expected)
        (grad_x,) = torch.autograd.grad(y, x, x.detach())
        (expected,) = torch.autograd.grad(expected, last, last.detach())
        torch.testing.assert_close(grad_x[-1:], expected)

    @pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (2, 3, 4, 5)])
    def test_implicit_dim(self, device, shape):
        x = torch.randn(shape, device=device)
        with pytest.warns(UserWarning, match=f"Implicit dimension choice for {self.function.__name__} ") as seen:
            y = self.function(x)
        assert seen[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(y, self.torch_function(x))

    def test_implicit_dim_compiles(self, device):
        function = self.function
        compiled = torch.compile(lambda x: function(x), fullgraph=True, backend="aot_eager")
        x = torch.randn(2, 3, device=device)
        torch.testing.assert_close(compiled(x), self.torch_function(x, 1))

    def test_axis_of_an_array(self):
        x = np.random.default_rng(0).standard_normal((3, 4))
        y = self.function(x, axis=0)
        np.testing.assert_allclose(y, self.torch_function(torch.from_numpy(x), 0).numpy(), rtol=1e-14)

    @pytest.mark.parametrize(
        ("args", "kwargs", "culprit"),
        [
            (([1.0, 2.0], 0), {}, "input"),
            ((None, 0), {}, "input"),
            ((torch.ones(3, dtype=torch.int64), 0), {}, "input"),
            ((torch.ones(3, dtype=torch.complex64), 0), {}, "input"),
            ((torch.ones(3, dtype=torch.complex64), 0), {"dtype": torch.float32}, "input"),
            ((torch.ones(3).to(torch.float8_e4m3fn), 0), {}, "input"),
            ((torch.ones(2, 3), 2), {}, "dim"),
            ((torch.ones(2, 3), -3), {}, "dim"),
            ((torch.ones(()), 1), {}, "dim"),
            ((torch.ones(2, 3), 1.0), {}, "dim"),
            ((torch.ones(2, 3), True), {}, "dim"),
            ((torch.ones(2, 3), (0, 1)), {}, "dim"),
            ((torch.ones(2, 3), 1, torch.int64), {}, "dtype"),
            ((torch.ones(2, 3), 1, torch.complex64), {}, "dtype"),
            ((torch.ones(2, 3), 1, "float32"), {}, "dtype"),
        ],
    )
    def test_bad_input(self, args, kwargs, culprit):
        with pytest.raises(cupyops.InputError, match=f"^{culprit} is "):
            self.function(*args, **kwargs)
