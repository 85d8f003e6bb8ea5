"""CuPy, NumPy and any DLPack arrays in, the same kind out, with no copy."""

import itertools
import re
import sys
import types

import numpy as np
import pytest
import torch
import toys
from toys import clean_registry as clean_registry

import cupyops
from cupyops._operator import arrays
from cupyops._util import libraries
from cupyops.errors import InputError, MissingDependencyError


def pointer_of(array):
    return array.__array_interface__["data"][0]


def identity():
    """An operator's function that shows what it was given."""
    seen = []

    def function(*args, **kwargs):
        seen.append((args, kwargs))
        return args[0]

    return function, seen


def called(*args, **kwargs):
    """What a function gets when called with arrays, and what comes back."""
    function, seen = identity()
    result = arrays.call(function, args, kwargs)
    return seen[0], result


class TestNumPy:
    def test_no_copy_in_and_out(self):
        x = np.arange(6.0).reshape(2, 3)
        ((given,), _), y = called(x)
        assert isinstance(given, torch.Tensor) and given.data_ptr() == pointer_of(x) == pointer_of(y)
        assert isinstance(y, np.ndarray) and y.shape == (2, 3)

    @pytest.mark.parametrize("dtype", [
        "float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool", "complex64",
        "complex128",
    ])  # fmt: skip
    def test_dtypes(self, dtype):
        x = np.ones((2, 2), dtype)
        ((given,), _), y = called(x)
        assert y.dtype == np.dtype(dtype) and given.dtype == getattr(torch, dtype) and pointer_of(x) == pointer_of(y)

    @pytest.mark.parametrize("view", [
        lambda x: x.T, lambda x: x[::2], lambda x: x[:, 1:], lambda x: np.broadcast_to(x[0], (4, 3)),
        lambda x: x[1, 2, None], lambda x: x[:0], lambda x: np.asfortranarray(x),
    ])  # fmt: skip
    def test_views_keep_their_strides(self, view):
        x = view(np.arange(12.0).reshape(4, 3))
        ((given,), _), _ = called(x)
        assert np.array_equal(given.numpy(), x)
        if x.flags.writeable:
            assert given.stride() == tuple(s // 8 for s in x.strides) or x.size == 0
            assert given.data_ptr() == pointer_of(x) or x.size == 0

    def test_read_only_arrays_are_copied(self):
        """torch has no read-only tensors: a write to one would be a write through the array's lock."""
        x = np.arange(3.0)
        x.flags.writeable = False
        ((given,), _), y = called(x)
        assert given.data_ptr() != pointer_of(x) and np.array_equal(y, x)

    @pytest.mark.parametrize("view", [lambda x: x[::-1], lambda x: x[:, ::-1], lambda x: x[::-2, ::-1]])
    def test_negative_strides(self, view):
        x = view(np.arange(12.0).reshape(4, 3))
        ((given,), _), y = called(x)
        assert np.array_equal(given.numpy(), x) and np.array_equal(y, x)

    def test_strides_that_are_no_multiple_of_the_item(self):
        """A field of a record array."""
        records = np.zeros(3, [("a", np.int8), ("b", np.float64)])
        records["b"] = [1, 2, 3]
        _, y = called(records["b"])
        assert y.tolist() == [1.0, 2.0, 3.0]

    def test_byte_order(self):
        _, y = called(np.arange(3.0).astype(">f8"))
        assert y.tolist() == [0.0, 1.0, 2.0] and y.dtype == np.float64

    @pytest.mark.parametrize("x", [np.array(["a"]), np.array([None]), np.array(["2020-01-01"], "datetime64[D]")])
    def test_dtypes_that_torch_has_not(self, x):
        with pytest.raises(InputError, match=re.escape(f"dtype {x.dtype}")):
            called(x)

    def test_zero_dimensions_and_none(self):
        for x in (np.array(2.5), np.zeros((0, 3)), np.zeros((1,))):
            _, y = called(x)
            assert isinstance(y, np.ndarray) and y.shape == x.shape and np.array_equal(x, y)

    def test_matrix_and_masked_array(self):
        """Subclasses of ndarray come back as plain arrays."""
        _, y = called(np.matrix([[1.0, 2.0]]))
        assert type(y) is np.ndarray and y.tolist() == [[1.0, 2.0]]

    def test_scalars_are_numbers(self):
        """A NumPy scalar beside an array stays what it is: a number for a parameter that takes one."""
        ((given, scale, axis), kwargs), _ = called(np.ones(3), np.float64(0.5), np.int64(1), dim=np.int32(0))
        assert isinstance(given, torch.Tensor)
        for value, expected in ((scale, 0.5), (axis, 1), (kwargs["dim"], 0)):
            assert not isinstance(value, (torch.Tensor, np.generic)) and value == expected

    def test_a_scalar_alone_is_an_array(self):
        """`relu(x.sum())`: NumPy gives a scalar where an array of no dimensions is meant."""
        y = cupyops.relu(np.float32(-2.0))
        assert isinstance(y, (np.ndarray, np.generic)) and y.shape == () and y.dtype == np.float32 and y == 0

    def test_nested_lists(self):
        x = np.ones(2)
        (([one, (two, three)],), _), y = called([x, (x, 3)])
        assert isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and three == 3
        assert isinstance(y, list) and isinstance(y[0], np.ndarray)

    def test_several_outputs(self):
        result = arrays.call(lambda x: (x + 1, x.argmax(), None), (np.arange(3.0),), {})
        assert isinstance(result, tuple) and result[0].tolist() == [1.0, 2.0, 3.0] and result[2] is None
        assert isinstance(result[1], np.ndarray) and result[1] == 2

    def test_a_result_that_wants_a_gradient_is_detached(self):
        weight = torch.ones(2, requires_grad=True)
        y = arrays.call(lambda x: x * weight, (np.ones(2),), {})
        assert y.tolist() == [1.0, 1.0]

    def test_a_result_that_numpy_cannot_show(self, monkeypatch):
        """bfloat16 has no dtype in NumPy itself: told, not left to a TypeError from inside."""
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
        with pytest.raises(MissingDependencyError, match=r"(?s)bfloat16 needs ml_dtypes .*pip install"):
            arrays.call(lambda x: x.bfloat16(), (np.ones(2, np.float32),), {})

    def test_conjugate_and_negative_views_are_resolved(self):
        x = torch.randn(3, dtype=torch.complex64)
        for tensor in (x.conj(), x.conj().imag):
            y = arrays.call(lambda _, tensor=tensor: tensor, (np.ones(1),), {})
            assert np.array_equal(y, tensor.resolve_conj().resolve_neg().numpy())

    def test_through_an_operator(self):
        op, _ = toys.product()
        y = op(np.arange(3.0), np.full(3, 2.0), shift=0.5, bias=np.ones(3))
        assert isinstance(y, np.ndarray) and y.tolist() == [0.5, 2.5, 4.5]


class TestExtendedDtypes:
    @pytest.fixture(autouse=True)
    def ml_dtypes(self):
        self.ml_dtypes = pytest.importorskip("ml_dtypes")

    @pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
    def test_no_copy_in_and_out(self, name):
        x = np.array([[1.0, -2.0, 0.5], [4.0, 0.0, -8.0]]).astype(getattr(self.ml_dtypes, name))
        ((given,), _), y = called(x)
        assert given.dtype == getattr(torch, name) and given.double().tolist() == x.astype(np.float64).tolist()
        assert y.dtype == x.dtype and given.data_ptr() == pointer_of(x) == pointer_of(y)

    @pytest.mark.parametrize("view", [
        lambda x: x.T, lambda x: x[::-1], lambda x: x[:, ::2], lambda x: x[:0], lambda x: x[1, 2, None],
        lambda x: np.array(x[1, 2]), lambda x: np.broadcast_to(x[0], (4, 3)),
    ])  # fmt: skip
    def test_views(self, view):
        x = view(np.arange(-6, 6).reshape(4, 3).astype(self.ml_dtypes.bfloat16))
        y = cupyops.relu(x)
        assert isinstance(y, np.ndarray) and y.dtype == x.dtype and np.array_equal(y, np.maximum(x, 0))

    def test_scalars(self):
        ((_, number), _), _ = called(np.ones(2), self.ml_dtypes.bfloat16(1.5))
        assert type(number) is float and number == 1.5
        y = cupyops.relu(self.ml_dtypes.bfloat16(-2))
        assert y.dtype == self.ml_dtypes.bfloat16 and y == 0

    def test_a_result_of_another_dtype_than_the_arguments(self):
        y = cupyops.softmax(np.zeros(4, np.float32), axis=0, dtype=torch.bfloat16)
        assert y.dtype == self.ml_dtypes.bfloat16 and y.tolist() == [0.25] * 4

    def test_vjp(self):
        x = np.array([-1.0, 2.0]).astype(self.ml_dtypes.bfloat16)
        y, pullback = cupyops.vjp(cupyops.relu, x)
        (grad,) = pullback(np.full(2, 3.0).astype(x.dtype))
        assert y.dtype == grad.dtype == x.dtype and grad.tolist() == [0.0, 3.0]

    def test_by_the_kernel(self):
        x = np.array([-1.0, 2.0]).astype(self.ml_dtypes.bfloat16)
        with cupyops.simulate(), cupyops.trace() as trace:
            assert cupyops.relu(x).tolist() == [0.0, 2.0]
        assert trace.routes() == {"simulator"}

    def test_dtypes_that_torch_has_not(self):
        with pytest.raises(InputError, match="dtype int4"):
            called(np.ones(2, self.ml_dtypes.int4))


def double(x, inplace=False):
    """A function that writes where it is told to."""
    return x.mul_(2) if inplace else x * 2


@pytest.mark.parametrize("inplace", [((True,), {}), ((), {"inplace": True})], ids=["positional", "keyword"])
class TestInPlace:
    def test_views_that_torch_has_not(self, inplace):
        """The caller's memory is written, though the function was given a copy of it."""
        args, kwargs = inplace
        for view in (slice(None), slice(None, None, -1)):
            x = np.array([-1.0, 2.0])
            y = x[view]
            assert arrays.call(double, (y, *args), kwargs) is y and x.tolist() == [-2.0, 4.0]

    def test_operators(self, inplace):
        args, kwargs = inplace
        for op in (cupyops.relu, cupyops.silu):
            x = np.array([-1.0, 2.0])
            expected = op(x)
            assert op(x, *args, **kwargs) is x and x.tolist() == expected.tolist()

    def test_what_is_immutable_is_left_alone(self, inplace):
        args, kwargs = inplace
        locked = np.array([-1.0, 2.0])
        locked.flags.writeable = False
        for x in (locked, Immutable(torch.tensor([-1.0, 2.0]))):
            for op in (cupyops.relu, cupyops.silu, lambda *args, **kwargs: arrays.call(double, args, kwargs)):
                with pytest.raises(InputError, match="inplace=True, but this .* cannot be written to"):
                    op(x, *args, **kwargs)
            assert (x if x is locked else x.tensor).tolist() == [-1.0, 2.0]


class TestCall:
    def test_tensors_pass_untouched(self):
        x = torch.ones(2)
        ((given,), _), y = called(x)
        assert given is x and y is x

    def test_axis_is_dim(self):
        _, kwargs = called(np.ones(2), axis=1)[0]
        assert kwargs == {"dim": 1}
        _, kwargs = called(torch.ones(2), axis=(0, 1))[0]
        assert kwargs == {"dim": (0, 1)}

    def test_axis_and_dim(self):
        with pytest.raises(InputError, match="axis and dim mean the same; give one of them"):
            called(np.ones(2), axis=1, dim=1)

    @pytest.mark.parametrize("nested", [False, True])
    def test_kinds_do_not_mix(self, nested):
        x, t = np.ones(2), torch.ones(2)
        args = ([x, t],) if nested else (x, t)
        with pytest.raises(
            InputError, match=r"different array libraries \(numpy, torch\) in one call; convert them to one"
        ):
            called(*args)
        with pytest.raises(InputError, match=r"\(numpy, dlpack\)"):
            called(x, Foreign(t))

    def test_numbers_mix_with_everything(self):
        called(np.ones(2), 3, 2.5, "x", None, True)
        called(torch.ones(2), np.float32(3), np.int64(2))

    def test_mixture_in_an_operator(self):
        op, _ = toys.product()
        with pytest.raises(InputError, match="different array libraries"):
            op(np.ones(3), torch.ones(3))
        with pytest.raises(InputError, match="different array libraries"):
            op(torch.ones(3), np.ones(3))

    def test_lists_of_numbers_are_no_arrays(self):
        with pytest.raises(InputError, match="x is list"):
            toys.product()[0]([1.0, 2.0], [1.0, 2.0])


class Foreign:
    """An array library of someone else's, by its protocols alone."""

    exported = 0

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **kwargs):
        Foreign.exported += 1
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __array_namespace__(self, api_version=None):
        return Foreign

    @staticmethod
    def from_dlpack(value):
        return Foreign(torch.from_dlpack(value))


class Immutable(Foreign):
    """As JAX's arrays are: not to be written to, and with no strides."""

    @staticmethod
    def from_dlpack(value):
        if not value.is_contiguous():
            raise RuntimeError("no strides")
        return Immutable(torch.from_dlpack(value))

    def __array_namespace__(self, api_version=None):
        return Immutable

    def __setitem__(self, index, value):
        raise TypeError("arrays are immutable")


class NoNamespace:
    def __dlpack__(self, **kwargs):
        return torch.ones(2).__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return torch.ones(2).__dlpack_device__()


class TestDLPack:
    def test_in_and_out_without_a_copy(self):
        x = Foreign(torch.arange(3.0))
        ((given,), _), y = called(x)
        assert isinstance(given, torch.Tensor) and isinstance(y, Foreign)
        assert given.data_ptr() == x.tensor.data_ptr() == y.tensor.data_ptr()

    def test_through_operators(self):
        op, _ = toys.product()
        y = op(Foreign(torch.arange(3.0)), Foreign(torch.full((3,), 2.0)))
        assert isinstance(y, Foreign) and y.tensor.tolist() == [0.0, 2.0, 4.0]
        assert cupyops.relu(Foreign(torch.tensor([-1.0, 1.0]))).tensor.tolist() == [0.0, 1.0]

    def test_without_a_namespace(self):
        with pytest.raises(
            InputError, match=r"NoNamespace offers __dlpack__ but no __array_namespace__.*torch\.from_dlpack"
        ):
            called(NoNamespace())

    def test_bfloat16(self):
        y = cupyops.relu(Foreign(torch.tensor([-1.0, 1.0], dtype=torch.bfloat16)))
        assert y.tensor.dtype == torch.bfloat16 and y.tensor.tolist() == [0.0, 1.0]

    def test_a_result_with_strides_that_the_library_has_not(self):
        y = arrays.call(lambda x: x[::2].expand(2, 2), (Immutable(torch.arange(4.0)),), {})
        assert isinstance(y, Immutable) and y.tensor.tolist() == [[0.0, 2.0]] * 2

    def test_a_result_that_the_library_has_not(self, monkeypatch):
        def refuse(value):
            raise BufferError("no such dtype")

        monkeypatch.setattr(Foreign, "from_dlpack", staticmethod(refuse))
        with pytest.raises(InputError, match="a result of torch.float32 cannot be of .*: no such dtype"):
            called(Foreign(torch.ones(2)))

    def test_conjugate_and_negative_views_are_resolved(self):
        x = torch.randn(3, dtype=torch.complex64)
        for tensor in (x.conj(), x.conj().imag):
            y = arrays.call(lambda _, tensor=tensor: tensor, (Foreign(torch.ones(1)),), {})
            assert torch.equal(y.tensor, tensor.resolve_conj().resolve_neg())

    @pytest.mark.parametrize("method", ["__dlpack__", "__dlpack_device__"])
    def test_an_array_that_is_no_tensor(self, monkeypatch, method):
        def refuse(*_, **__):
            raise AttributeError("nothing there yet")

        monkeypatch.setattr(Foreign, method, refuse)
        with pytest.raises(InputError, match="Foreign cannot be a tensor: nothing there yet; give a torch.Tensor$"):
            called(Foreign(torch.ones(2)))

    def test_vjp(self):
        y, pullback = cupyops.vjp(cupyops.relu, Foreign(torch.tensor([-1.0, 2.0])))
        (grad,) = pullback(Foreign(torch.tensor([3.0, 3.0])))
        assert isinstance(y, Foreign) and isinstance(grad, Foreign) and grad.tensor.tolist() == [0.0, 3.0]


class TestVJP:
    def test_numpy(self):
        x = np.linspace(-1.0, 1.0, 5)
        y, pullback = cupyops.vjp(cupyops.relu, x)
        (grad,) = pullback(np.full(5, 2.0))
        assert isinstance(y, np.ndarray) and isinstance(grad, np.ndarray)
        assert y.tolist() == np.maximum(x, 0).tolist() and grad.tolist() == (2.0 * (x > 0)).tolist()

    def test_more_than_once(self):
        _, pullback = cupyops.vjp(cupyops.relu, np.ones(3))
        assert pullback(np.ones(3))[0].tolist() == [1.0] * 3
        assert pullback(np.full(3, 5.0))[0].tolist() == [5.0] * 3

    def test_several_inputs(self):
        op, _ = toys.product()
        x, w, b = np.arange(3.0), np.full(3, 2.0), np.ones(3)
        y, pullback = cupyops.vjp(op, x, w, b)
        grads = pullback(np.ones(3))
        assert [g.tolist() for g in grads] == [w.tolist(), x.tolist(), [1.0] * 3]

    def test_the_same_array_twice(self):
        op, _ = toys.product()
        x = np.arange(3.0)
        _, pullback = cupyops.vjp(op, x, x)
        assert [g.tolist() for g in pullback(np.ones(3))] == [x.tolist(), x.tolist()]

    def test_several_outputs(self):
        op, _ = toys.extremum()
        x = np.array([[1.0, 5.0, 3.0]])
        (largest, index, smallest), pullback = cupyops.vjp(op, x)
        assert index.tolist() == [1] and largest.tolist() == [5.0]
        (grad,) = pullback(np.array([2.0]), np.array([0]), np.array([3.0]))
        assert grad.tolist() == [[3.0, 2.0, 0.0]]

    def test_an_output_without_a_gradient_takes_none(self):
        op, _ = toys.extremum()
        _, pullback = cupyops.vjp(op, np.array([[1.0, 5.0, 3.0]]))
        assert pullback(np.array([2.0]), None, None)[0].tolist() == [[0.0, 2.0, 0.0]]

    def test_integer_primals_have_none(self):
        def pick(x, index):
            return x.gather(-1, index)

        y, pullback = cupyops.vjp(pick, np.array([[1.0, 2.0]]), np.array([[1]]))
        assert y.tolist() == [[2.0]]
        grad, nothing = pullback(np.array([[3.0]]))
        assert grad.tolist() == [[0.0, 3.0]] and nothing is None

    def test_nothing_to_differentiate(self):
        _, pullback = cupyops.vjp(lambda i: i + 1, np.arange(3))
        assert pullback(np.arange(3)) == (None,)

    def test_an_unused_primal_has_a_gradient_of_zeros(self):
        _, pullback = cupyops.vjp(lambda x, w: x * 2, np.ones(2), np.ones(3))
        grad, unused = pullback(np.ones(2))
        assert grad.tolist() == [2.0, 2.0] and unused.tolist() == [0.0] * 3

    def test_wrong_number_of_gradients(self):
        _, pullback = cupyops.vjp(cupyops.relu, np.ones(2))
        for grads in ((), (np.ones(2), np.ones(2))):
            with pytest.raises(InputError, match=f"pullback got {len(grads)} gradients for 1 outputs"):
                pullback(*grads)

    @pytest.mark.parametrize("grad", [np.ones(3), np.ones((2, 2)), np.ones(())])
    def test_gradient_of_another_shape(self, grad):
        _, pullback = cupyops.vjp(cupyops.relu, np.ones(2))
        with pytest.raises(InputError, match="a gradient of shape .* for an output of shape"):
            pullback(grad)

    def test_tensors(self):
        x = torch.tensor([-1.0, 2.0])
        y, pullback = cupyops.vjp(cupyops.relu, x)
        (grad,) = pullback(torch.tensor([3.0, 3.0]))
        assert isinstance(grad, torch.Tensor) and grad.tolist() == [0.0, 3.0] and not x.requires_grad

    def test_inside_no_grad(self):
        with torch.no_grad():
            _, pullback = cupyops.vjp(cupyops.relu, np.ones(2))
            assert pullback(np.ones(2))[0].tolist() == [1.0, 1.0]

    @pytest.mark.parametrize("function", [np.exp, lambda x: x * np.ones(3)], ids=["function", "other array"])
    def test_numpy_inside(self, function):
        with pytest.raises(cupyops.InputError, match="inside cupyops.vjp arrays are tensors: call PyTorch's functions"):
            cupyops.vjp(function, np.ones(3))

    def test_scalar_results_and_gradients(self):
        x = np.array([1.0, 2.0])
        y, pullback = cupyops.vjp(lambda t: (t * t).sum(), x)
        for one in (np.array(1.0), np.float64(1.0), 1.0):
            assert pullback(one)[0].tolist() == [2.0, 4.0]
        assert y == 5.0

    def test_scalar_primals(self):
        y, pullback = cupyops.vjp(lambda t: t * t, np.float64(3.0))
        assert y == 9.0 and pullback(1.0)[0] == 6.0

    def test_gradient_of_another_dtype(self):
        """`np.ones` is float64 whatever the operator computes in."""
        _, pullback = cupyops.vjp(cupyops.relu, np.ones(2, np.float32))
        (grad,) = pullback(np.ones(2))
        assert grad.dtype == np.float32 and grad.tolist() == [1.0, 1.0]

    def test_no_gradient_at_all(self):
        _, pullback = cupyops.vjp(cupyops.relu, np.ones(2))
        assert pullback(None)[0].tolist() == [0.0, 0.0]


def fit(xp, make):
    """Softmax regression by `cupyops.vjp` alone: the first gradients, and the losses of a few steps."""
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(12, 5)), rng.integers(0, 3, 12)
    weight, bias = rng.normal(size=(3, 5)), np.zeros(3)
    x, labels, weight, bias = make(x), make(labels), make(weight), make(bias)

    def loss(x, weight, bias, labels):
        return cupyops.cross_entropy(cupyops.linear(x, weight, bias), labels.long())

    losses, first = [], None
    for _ in range(5):
        value, pullback = cupyops.vjp(loss, x, weight, bias, labels)
        _, grad_weight, grad_bias, nothing = pullback(xp.ones_like(value))
        assert nothing is None
        first = first or (grad_weight, grad_bias)
        weight, bias = weight - 0.5 * grad_weight, bias - 0.5 * grad_bias
        losses.append(float(value))
    return first, losses


def by_hand():
    """The same gradients, in NumPy."""
    rng = np.random.default_rng(0)
    x, labels, weight = rng.normal(size=(12, 5)), rng.integers(0, 3, 12), rng.normal(size=(3, 5))
    scores = np.exp(x @ weight.T)
    difference = (scores / scores.sum(1, keepdims=True) - np.eye(3)[labels]) / 12
    return difference.T @ x, difference.sum(0)


def assert_fits(xp, make, kind, tolerance):
    grads, losses = fit(xp, make)
    assert all(isinstance(grad, kind) for grad in grads)
    for grad, expected in zip(grads, by_hand()):
        np.testing.assert_allclose(grad.get() if hasattr(grad, "get") else grad, expected, atol=tolerance)
    assert all(after < before for before, after in itertools.pairwise(losses))


def test_a_model_in_numpy():
    assert_fits(np, np.asarray, np.ndarray, 1e-12)


@pytest.mark.gpu
def test_a_model_in_cupy():
    cp = pytest.importorskip("cupy")
    with cp.cuda.Stream(non_blocking=True):
        assert_fits(cp, cp.asarray, cp.ndarray, 1e-12)


class TestJAX:
    @pytest.fixture(autouse=True)
    def jax(self):
        self.jax = pytest.importorskip("jax")
        self.jnp = self.jax.numpy

    def test_a_model(self):
        assert_fits(self.jnp, self.jnp.asarray, self.jax.Array, 1e-5)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "bool", "complex64", "float8_e5m2"])
    def test_dtypes(self, dtype):
        ((given,), _), y = called(self.jnp.ones((2, 2), dtype))
        assert given.dtype == getattr(torch, dtype) and isinstance(y, self.jax.Array) and y.dtype == dtype

    @pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 4)])
    def test_shapes(self, shape):
        x = -self.jnp.ones(shape)
        y = cupyops.relu(x)
        assert isinstance(y, self.jax.Array) and y.shape == shape and bool((y == 0).all())

    def test_bfloat16_gradients(self):
        x = self.jnp.array([-1.0, 2.0], "bfloat16")
        y, pullback = cupyops.vjp(cupyops.relu, x)
        (grad,) = pullback(self.jnp.ones_like(y))
        assert y.dtype == grad.dtype == x.dtype and grad.tolist() == [0.0, 1.0]

    def test_inputs_are_never_written_to(self):
        x = self.jnp.array([-1.0, 2.0])
        for op in (cupyops.relu, cupyops.silu):
            with pytest.raises(InputError, match="cannot be written to: JAX arrays are immutable"):
                op(x, inplace=True)
        assert x.tolist() == [-1.0, 2.0]

    def test_a_result_with_strides(self):
        y = arrays.call(lambda x: x[::2].expand(2, 2), (self.jnp.arange(4.0),), {})
        assert isinstance(y, self.jax.Array) and y.tolist() == [[0.0, 2.0]] * 2

    def test_in_the_simulator(self):
        with cupyops.simulate(), cupyops.trace() as trace:
            assert cupyops.relu(self.jnp.array([-1.0, 2.0])).tolist() == [0.0, 2.0]
        assert trace.routes() == {"simulator"}

    def test_transformations(self):
        """What is being traced has no values; a callback has."""
        x = self.jnp.array([-1.0, 2.0])
        with pytest.raises(InputError, match="Tracer cannot be a tensor: .*; inside jax.jit.* by jax.pure_callback"):
            self.jax.jit(cupyops.relu)(x)
        shape = self.jax.ShapeDtypeStruct(x.shape, x.dtype)
        assert self.jax.jit(lambda x: self.jax.pure_callback(cupyops.relu, shape, x))(x).tolist() == [0.0, 2.0]


class StandIn:
    """What the border asks of a CuPy array, on a NumPy array."""

    def __init__(self, array):
        self.array = array
        self.strides, self.dtype, self.itemsize = array.strides, array.dtype, array.itemsize

    def view(self, dtype):
        return StandIn(self.array.view(dtype))

    def copy(self):
        return StandIn(self.array.copy())

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class TestCuPyStandIn:
    @pytest.fixture(autouse=True)
    def cupy(self, monkeypatch):
        module = types.SimpleNamespace(ndarray=StandIn, from_dlpack=lambda t: StandIn(np.from_dlpack(t)))
        monkeypatch.setitem(sys.modules, "cupy", module)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
    @pytest.mark.parametrize(
        "view", [lambda x: x, lambda x: x[::-1], lambda x: x.T, lambda x: x[:0], lambda x: x[0, 1:2]]
    )
    def test_there_and_back(self, dtype, view):
        if dtype != "float32":
            dtype = getattr(pytest.importorskip("ml_dtypes"), dtype)
        x = view(np.arange(6).reshape(2, 3).astype(dtype))
        tensor = libraries._from_cupy(StandIn(x))
        assert tensor.shape == x.shape and tensor.double().tolist() == x.astype(np.float64).tolist()
        assert all(stride >= 0 for stride in x.strides) == (tensor.data_ptr() == pointer_of(x)) or not x.size
        back = libraries._to_cupy(tensor, None)
        assert isinstance(back, StandIn) and back.dtype == x.dtype and np.array_equal(back.array, x)


@pytest.mark.gpu
class TestCuPy:
    @pytest.fixture(autouse=True)
    def cupy(self):
        self.cp = pytest.importorskip("cupy")

    def test_no_copy_in_and_out(self):
        x = self.cp.arange(6.0).reshape(2, 3)
        ((given,), _), y = called(x)
        assert isinstance(given, torch.Tensor) and given.is_cuda and isinstance(y, self.cp.ndarray)
        assert given.data_ptr() == x.data.ptr == y.data.ptr

    def test_operator(self):
        x = self.cp.linspace(-1, 1, 1001, dtype=self.cp.float32)
        with cupyops.trace() as trace:
            y = cupyops.relu(x)
        assert isinstance(y, self.cp.ndarray) and (y == self.cp.maximum(x, 0)).all() and trace.routes() == {"kernel"}

    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64", "bool", "complex64"])
    def test_dtypes(self, dtype):
        _, y = called(self.cp.ones(3, dtype))
        assert y.dtype == np.dtype(dtype)

    def test_views(self):
        x = self.cp.arange(12.0).reshape(3, 4)
        for view in (x.T, x[::2], x[:, 1:], x[:0]):
            y = cupyops.relu(view)
            assert y.shape == view.shape and (y == self.cp.maximum(view, 0)).all()
        assert (cupyops.relu(x[::-1]) == x[::-1]).all()

    def test_scalars_beside_arrays(self):
        ((given, scale), _), _ = called(self.cp.ones(2), np.float32(2))
        assert given.is_cuda and scale == 2.0

    def test_the_current_stream_of_cupy(self):
        """Work before the call on CuPy's stream is waited for; the result is there for work after it on that stream."""
        cupyops.relu(self.cp.ones(2, self.cp.float32))
        stream = self.cp.cuda.Stream(non_blocking=True)
        with stream:
            x = self.cp.full(1 << 20, -1.0, self.cp.float32)
            for _ in range(200):
                x += 0.01
            y = cupyops.relu(x) * 2
        stream.synchronize()
        assert self.cp.allclose(y, 2 * self.cp.maximum(x, 0)) and float(x[0]) > 0.9

    def test_the_stream_that_torch_sees(self):
        stream = self.cp.cuda.Stream(non_blocking=True)
        seen = []
        with stream:
            arrays.call(lambda x: seen.append(torch.cuda.current_stream().cuda_stream) or x, (self.cp.ones(2),), {})
        assert seen == [stream.ptr] and torch.cuda.current_stream().cuda_stream != stream.ptr

    def test_memory_outlives_its_arrays(self):
        """CuPy's pool does not hand out memory that a result still names."""
        y = cupyops.relu(self.cp.arange(1000, dtype=self.cp.float32))
        others = [self.cp.full(1000, 7.0, self.cp.float32) for _ in range(50)]
        assert (y == self.cp.arange(1000)).all() and len(others) == 50

    def test_vjp(self):
        op, _ = toys.product()
        x, w = self.cp.arange(3.0), self.cp.full(3, 2.0)
        y, pullback = cupyops.vjp(op, x, w)
        grads = pullback(self.cp.ones(3))
        assert all(isinstance(a, self.cp.ndarray) for a in (y, *grads))
        assert grads[0].tolist() == w.tolist() and grads[1].tolist() == x.tolist()

    def test_vjp_on_a_stream(self):
        with self.cp.cuda.Stream(non_blocking=True) as stream:
            x = self.cp.linspace(-1, 1, 4096, dtype=self.cp.float32)
            y, pullback = cupyops.vjp(cupyops.relu, x)
            (grad,) = pullback(self.cp.ones_like(y))
            stream.synchronize()
            assert (grad == (x > 0)).all()

    def test_mixture(self):
        op, _ = toys.product()
        with pytest.raises(InputError, match=r"\(cupy, torch\)|\(cupy, numpy\)"):
            op(self.cp.ones(3), torch.ones(3, device="cuda"))
        with pytest.raises(InputError, match="different array libraries"):
            op(self.cp.ones(3), np.ones(3))

    def test_second_device(self):
        if torch.cuda.device_count() < 2:
            pytest.skip("one CUDA device only")
        with self.cp.cuda.Device(1):
            x = self.cp.array([-1.0, 2.0], self.cp.float32)
            y = cupyops.relu(x)
            assert y.device.id == 1 and y.tolist() == [0.0, 2.0]

    def test_a_device_that_is_not_current(self):
        """Neither CuPy's nor PyTorch's current device is that of the arrays."""
        if torch.cuda.device_count() < 2:
            pytest.skip("one CUDA device only")
        with self.cp.cuda.Device(1):
            x = self.cp.array([-1.0, 2.0], self.cp.float32)
        y, pullback = cupyops.vjp(cupyops.relu, x)
        (grad,) = pullback(y)
        assert y.device.id == grad.device.id == 1 and y.tolist() == grad.tolist() == [0.0, 2.0]

    @pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
    def test_small_shapes(self, shape):
        x = -self.cp.ones(shape, self.cp.float32)
        y = cupyops.relu(x)
        assert isinstance(y, self.cp.ndarray) and y.shape == shape and (y == 0).all()

    def test_extended_dtypes(self):
        dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
        x = self.cp.asarray(np.array([[-1.0, 2.0], [3.0, -4.0]]).astype(dtype))
        with cupyops.trace() as trace:
            y, pullback = cupyops.vjp(cupyops.relu, x.T)
            (grad,) = pullback(y)
        assert y.dtype == grad.dtype == dtype and trace.routes() == {"kernel"}
        expected = [[0.0, 3.0], [2.0, 0.0]]
        assert y.get().tolist() == grad.get().tolist() == expected

    def test_in_place(self):
        for op in (cupyops.relu, cupyops.silu):
            x = self.cp.array([-1.0, 2.0, 3.0])
            expected = op(x).get()
            op(x[::-1], inplace=True)
            assert (x.get() == expected).all()

    def test_a_gradient_used_on_another_stream_than_its_own(self):
        """Freed while that stream still reads it, its memory is not handed out to the stream of the forward."""
        first, second = (self.cp.cuda.Stream(non_blocking=True) for _ in range(2))
        with first:
            x = self.cp.full(1 << 24, 2.0, self.cp.float32)
            _, pullback = cupyops.vjp(cupyops.relu, x)
        first.synchronize()
        with second:
            grad = pullback(self.cp.full(1 << 24, 3.0, self.cp.float32))[0]
            total = self.cp.zeros_like(grad)
            for _ in range(200):
                total += grad
            del grad
        with first:
            for _ in range(50):
                cupyops.relu(self.cp.full(1 << 24, 100.0, self.cp.float32))
        self.cp.cuda.Device().synchronize()
        assert (total == 600).all()
