import groups
import pytest
import torch
from contract import Make, OperatorContract, Sample
from groups import by_torch, ends

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu
from cupyops._dispatch.gemm import grouped

HALF = [torch.float16, torch.bfloat16]


class TestGroupedMm(OperatorContract):
    function = staticmethod(cupyops.grouped_mm)
    torch_function = staticmethod(by_torch)
    dtypes = HALF
    kernels = set()  # apart from Hopper none

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield Sample(make(40, 24), make(4, 24, 8), offs=ends(0, 17, 17, 33, device=make.device))  # rows of no group
        yield Sample(make(300, 72), make(2, 72, 264), offs=ends(290, 300, device=make.device))

    def small_samples(self, make: Make):
        yield Sample(make(6, 8), make(3, 8, 16), offs=ends(2, 2, 6, device=make.device))
        yield Sample(make(5, 16), make(1, 16, 8), offs=ends(5, device=make.device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
def test_on_hopper(dtype):
    """As tests/simulator has them."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    with cupyops.trace() as trace:
        for call in groups.calls(dtype, "cuda"):
            call()
    assert {launch.kernel.partition("<")[0] for launch in trace.launches()} >= {"grouped_mm_rows", "grouped_mm_shares"}


@pytest.mark.gpu
@pytest.mark.parametrize("offs", [[0, 3000, 3000, 3001, 5000, 9000, 9111, 10000], [10240] * 8, [1280, *[2560] * 7]])
@pytest.mark.parametrize("turned", [False, True])
def test_several_tiles_of_each_block(offs, turned):
    """More tiles than multiprocessors, twice the same bits."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    groups.compare(10240, 1032, 2056, offs, turned, torch.bfloat16, "cuda")
    x, weight = torch.randn(10240, 1032, device="cuda"), torch.randn(8, 1032, 2056, device="cuda")
    at, found = ends(*offs, device="cuda"), []
    for _ in range(2):
        leaves = [t.bfloat16().requires_grad_() for t in (x, weight)]
        with cupyops.use_form(groups.BY_WGMMA):
            y = cupyops.grouped_mm(*leaves, offs=at)
            found.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """No size of a group is known to the host: a graph that is captured once serves other groups."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    x, weight = torch.randn(520, 136, device="cuda").half(), torch.randn(3, 136, 264, device="cuda").half()
    at = ends(100, 400, 520, device="cuda")
    cupyops.grouped_mm(x, weight, offs=at)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cupyops.grouped_mm(x, weight, offs=at)
    for offs in ((100, 400, 520), (0, 1, 300), (257, 257, 258)):
        at.copy_(ends(*offs))
        graph.replay()
        torch.testing.assert_close(y, by_torch(x.float(), weight.float(), offs=at).half(), rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("name", ["input", "grad"])
def test_the_next_group_is_not_seen(name):
    """NaN in one group's rows reaches no other group, though a tile or a stage has rows of both."""
    x, weight = torch.randn(70, 72).half(), torch.randn(3, 72, 40).half().requires_grad_()
    grad = torch.randn(70, 40).half()
    leaf = x.clone()
    (leaf if name == "input" else grad)[20:50] = torch.nan
    leaf.requires_grad_()
    with cupyops.simulate("sm_90"), assume_gpu(**groups.HOPPER), cupyops.use_form(groups.BY_WGMMA):
        y = cupyops.grouped_mm(leaf, weight, offs=ends(20, 50, 65))
        grad_x, grad_weight = torch.autograd.grad(y, (leaf, weight), grad)
    rows = torch.arange(70)
    middle = (rows >= 20) & (rows < 50)
    assert torch.equal(y.isnan().any(1), middle & (name == "input"))
    assert torch.equal(grad_x.isnan().any(1), middle & (name == "grad"))
    assert grad_weight.isnan().flatten(1).any(1).tolist() == [False, True, False]
    assert not y[65:].any() and not grad_x[65:].any()


@pytest.mark.parametrize("offs", [[-5, 20, 900], [-(2**31), 7, 2**31 - 1]])
def test_ends_that_make_no_sense(offs):
    """On a GPU nobody reads them first: no kernel reads or writes outside of its tensors, which the simulator checks."""
    x, weight = (torch.randn(shape).half().requires_grad_() for shape in ((40, 72), (3, 72, 40)))
    with cupyops.simulate("sm_90"), assume_gpu(**groups.HOPPER), cupyops.use_form(groups.BY_WGMMA):
        y = cupyops.grouped_mm(x, weight, offs=ends(*offs))
        found = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert [t.shape for t in (y, *found)] == [(40, 40), x.shape, weight.shape]
    with pytest.raises(
        cupyops.InputError, match=r"offs is .*, expected ends of groups that do not decrease, from 0 to 40"
    ):
        cupyops.grouped_mm(x, weight, offs=ends(*offs))


def test_operands_that_are_views():
    """Of any strides, offsets into storage and transposed gradients: copied where TMA cannot read them."""
    x = torch.randn(3, 33, 90).half()[1, :, 5:77].requires_grad_()
    weight = torch.randn(72, 3, 41).half()[:, :, 1:].transpose(0, 1).requires_grad_()
    grad, at = torch.randn(40, 33).half().T, ends(3, 20, 33)
    with cupyops.simulate("sm_90"), assume_gpu(**groups.HOPPER), cupyops.use_form(groups.BY_WGMMA):
        y = cupyops.grouped_mm(x, weight, offs=at)
        found = y, *torch.autograd.grad(y, (x, weight), grad)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    truth = by_torch(*exact, offs=at)
    right = truth, *torch.autograd.grad(truth, exact, grad.double())
    for a, b in zip(found, right):
        torch.testing.assert_close(a.double(), b, rtol=2e-3, atol=2e-2)


def test_the_gradient_of_a_transposed_weight_lies_as_the_weight_does():
    x, weight = torch.randn(10, 16).bfloat16(), torch.randn(2, 24, 16).bfloat16().requires_grad_()
    with cupyops.simulate("sm_90"), assume_gpu(**groups.HOPPER), cupyops.use_form(groups.BY_WGMMA):
        turned = weight.mT
        (grad,) = torch.autograd.grad(cupyops.grouped_mm(x, turned, offs=ends(4, 10)).sum(), turned)
    assert grad.mT.is_contiguous()


@pytest.mark.parametrize("frozen", ["x", "weight", None])
def test_what_is_kept_for_backward(frozen):
    """Each operand for the gradient of the other alone, and where groups end."""
    x, weight, at = torch.randn(10, 16).half(), torch.randn(2, 16, 24).half(), ends(4, 10)
    x.requires_grad_(frozen != "x"), weight.requires_grad_(frozen != "weight")
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with cupyops.simulate("sm_90"), assume_gpu(**groups.HOPPER), cupyops.use_form(groups.BY_WGMMA), hooks:
        cupyops.grouped_mm(x, weight, offs=at)
    needed = (at, *([x] if frozen != "weight" else []), *([weight] if frozen != "x" else []))
    assert sum(kept.values()) == sum(t.nbytes for t in needed)


KINDS = [
    ((12, 5), (3, 5, 7), (2, 2, 9)), ((3, 4, 5), (5, 12), (2, 2, 9)), ((4, 12), (12, 5), (2, 2, 9)),
    ((3, 4, 5), (3, 5, 7), None), ((0, 5), (3, 5, 7), (0, 0, 0)), ((6, 0), (2, 0, 4), (1, 6)),
    ((6, 4), (0, 4, 3), ()), ((3, 0), (0, 5), (0, 0)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("a", "b", "offs"), KINDS)
def test_every_kind(device, a, b, offs, dtype):
    leaves = [torch.randn(shape, device=device, dtype=torch.float64).to(dtype).requires_grad_() for shape in (a, b)]
    at = None if offs is None else ends(*offs, device=device)
    y = cupyops.grouped_mm(*leaves, offs=at)
    if offs == ():
        assert y.shape == (6, 3) and not y.any()
        return
    truth = by_torch(*leaves, offs=at)
    torch.testing.assert_close(y, truth)
    grad = torch.randn_like(truth)
    for ours, theirs in zip(torch.autograd.grad(y, leaves, grad), torch.autograd.grad(truth, leaves, grad)):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("a", "b", "offs"), KINDS[:4])
def test_second_derivatives_and_transforms(a, b, offs):
    """gradcheck of both orders; a vmap over one operand; a trace that holds for other groups."""
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (a, b)]
    at = None if offs is None else ends(*offs)

    def product(x, y):
        return cupyops.grouped_mm(x, y, offs=at)

    assert torch.autograd.gradcheck(product, leaves) and torch.autograd.gradgradcheck(product, leaves)
    stacked = torch.randn(2, *a, dtype=torch.float64)
    found = torch.func.vmap(product, (0, None))(stacked, leaves[1])
    torch.testing.assert_close(found, torch.stack([by_torch(one, leaves[1], offs=at) for one in stacked]))
    if at is not None:
        values = [t.detach() for t in leaves]
        traced = torch.jit.trace(lambda x, y, o: cupyops.grouped_mm(x, y, offs=o), (*values, at), check_trace=False)
        torch.testing.assert_close(traced(*values, ends(0, 5, 12)), by_torch(*values, offs=ends(0, 5, 12)))


def test_second_derivatives_by_kernels():
    leaves = [torch.randn(shape).half().requires_grad_() for shape in ((20, 16), (2, 16, 8))]
    found = []
    for function in (cupyops.grouped_mm, by_torch):
        with cupyops.simulate("sm_90"), assume_gpu(**groups.HOPPER):
            y = function(*leaves, offs=ends(7, 18))
            first = torch.autograd.grad(y.float().square().sum(), leaves, create_graph=True)
            found.append((*first, *torch.autograd.grad(sum(g.float().square().sum() for g in first), leaves)))
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=4e-3, atol=4e-3 * theirs.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_pytorch_s(dtype):
    """PyTorch's own function, of rows in whole vectors and groups without a rest."""
    a, b = torch.randn(9, 8).to(dtype), torch.randn(3, 8, 16).to(dtype)
    shares = torch.randn(8, 24).to(dtype), torch.randn(24, 16).to(dtype)
    for given, at in [((a, b), ends(2, 2, 9)), (shares, ends(8, 16, 24))]:
        torch.testing.assert_close(cupyops.grouped_mm(*given, offs=at), torch.nn.functional.grouped_mm(*given, offs=at))


def test_pytorch_s_is_taken_where_it_may_be():
    """Nothing is measured to be faster yet: the forms choose PyTorch's function, and say why."""
    from cupyops._dispatch.core.gpu import gpu
    from cupyops._dispatch.core.library import ByPyTorch
    from cupyops._dispatch.gemm import grouped

    problem = grouped.rows_problem(torch.randn(64, 16).half(), torch.randn(2, 16, 8).half())
    with assume_gpu(capability=9, shared=232448, library=True):
        assert isinstance(grouped.ROWS.choose(problem, gpu(torch.device("cpu"))), ByPyTorch)
    with assume_gpu(capability=9, shared=232448):
        assert isinstance(grouped.ROWS.choose(problem, gpu(torch.device("cpu"))), grouped.Rows)


def test_bad_input(device):
    x, w, at = torch.randn(4, 3, device=device), torch.randn(2, 3, 5, device=device), ends(1, 4, device=device)
    for args, more, words in [
        ((x[0], w), {"offs": at}, "input is a tensor .* expected 2 or 3 dimensions"),
        ((x, w[:, :2]), {"offs": at}, r"mat2 has shape \(2, 2, 5\), expected \(\.\.\., 3, n\)"),
        ((x, w), {}, "offs is None, expected where each group ends"),
        ((x, w), {"offs": at.long()}, "offs is .*int64.*, expected torch.int32 and 1 dimension"),
        ((x, w), {"offs": at[:1]}, r"offs has shape \(1,\), expected \(2,\)"),
        ((x, w), {"offs": 3}, "offs is 3"),
        ((x, w.double()), {"offs": at}, "mat2 is torch.float64"),
        ((x[None], w), {}, r"mat2 has shape \(2, 3, 5\), expected \(1, \.\.\.\)"),
        ((w.mT, w), {"offs": at}, "mat2 has shape|offs is given, expected None"),
        ((x, w), {"offs": at, "bias": w[:, 0]}, "bias is given, expected None"),
        ((x, w), {"offs": at, "out_dtype": torch.float64}, "out_dtype is torch.float64, expected that of input"),
        ((x, 1.0), {"offs": at}, "mat2 is 1.0"),
    ]:
        with pytest.raises(cupyops.InputError, match=words):
            cupyops.grouped_mm(*args, **more)


def test_what_tma_does_not_read_as_it_lies_is_copied():
    """Off 16-byte boundaries, contiguous or not, or with lines that are no whole vectors; a copy lies as the tensor did."""
    flat = torch.randn(4 * 16 * 24 + 8).half()
    even, odd = flat[:-8].view(4, 16, 24), flat[1:-7].view(4, 16, 24)
    for x in (even, even.mT):
        assert grouped._in_vectors(x) is x
    for x in (odd, odd.mT, even[..., 1:17], even[:, :, ::2]):
        copy = grouped._in_vectors(x)
        assert copy.data_ptr() % 16 == 0 and torch.equal(copy, x) and (copy.stride(1) == 1) is (x.stride(1) == 1)
