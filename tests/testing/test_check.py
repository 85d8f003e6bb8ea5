"""`check` itself: what it takes, where it runs, the smallest call that it finds, and the line that fails again."""

from __future__ import annotations

import math
import sys
import time

import pytest
import torch
from broken_operators import normal
from faulty_operators import DOUBLE, doubling

import cupyops
from cupyops import InputError
from cupyops.testing import Call, NotApplicable, Tolerance, check, hazards, shrink, target
from cupyops.testing.case import Case
from cupyops.testing.checker import attempt
from cupyops.testing.hazard import FAMILIES, Hazard, family_of


def half_off(x):
    """Wrong from three elements on."""
    return torch.relu(x) + (0.5 if x.numel() >= 3 else 0.0)


def tried(function, args, kwargs=None, **options):
    return check(function, args, kwargs, **{"reference": torch.relu, "progress": False, **options})


def only_row(function, args, kwargs=None, hazard="accuracy", **options):
    """The one row of a check of one hazard."""
    (row,) = tried(function, args, kwargs, only=hazard, **options).rows
    return row


def put_in_place_of_all(monkeypatch, one):
    """The one hazard that there is."""
    monkeypatch.setattr(sys.modules[attempt.__module__], "hazards", lambda: {one.name: one})


@pytest.mark.parametrize(
    ("function", "args", "options", "message"),
    [
        (torch.relu, [normal(3)], {"only": ["accuracy", "stride"]},
         "^only is 'stride', expected one of strided, grad_strided, output_strides$"),
        (torch.relu, [normal(3)], {"skip": ["accuracy", "stride"]},
         "^skip is 'stride', expected one of strided, grad_strided, output_strides$"),
        (torch.relu, [normal(3)], {"only": "nothing"}, "^only is 'nothing', expected one of the names that cupyops"),
        (torch.relu, [normal(3)], {"skip": "nothing"}, "^skip is 'nothing', expected one of the names that cupyops"),
        (torch.relu, [normal(3)], {"backends": "cuda"}, "^backends is 'cuda', expected one of reference, simulator, gpu$"),
        (half_off, [normal(3)], {"reference": None}, "half_off is no cupyops operator: give reference="),
        (normal(3), [normal(3)], {}, "^op is Tensor, expected an operator or a function$"),
        # a tensor is a sequence of its rows to Python: they would be taken for the arguments
        (torch.relu, normal(3), {}, "^args is Tensor, expected a list of the arguments$"),
        (torch.relu, "x", {}, "^args is str, expected a list of the arguments$"),
        (torch.relu, iter([1]), {}, "^args is list_iterator, expected a list of the arguments$"),
        (torch.add, [normal(3), normal(3)], {},
         r"^the reference refuses: TypeError: relu\(\) takes .*; the sample call must be"),
        (lambda image, boxes: image, [normal(3), normal(3)], {"reference": torch.add, "keep": "rois"},
         "^keep is 'rois', expected one of 0, 1, image, boxes$"),
    ],
)  # fmt: skip
def test_what_is_refused(function, args, options, message):
    with pytest.raises(InputError, match=message):
        tried(function, args, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_here():
    with pytest.raises(InputError, match="^backends is 'gpu', but there is no CUDA GPU here; leave it out$"):
        tried(torch.relu, [normal(3)], backends=["reference", "gpu"])


def test_only_and_skip():
    chosen = tried(torch.relu, [normal(3)], only=["strided", "accuracy", "empty"], skip="empty")
    assert [row.hazard for row in chosen.rows] == ["accuracy", "strided"]  # in the order of a report
    assert not tried(torch.relu, [normal(3)], only="accuracy", skip="accuracy").rows
    assert not tried(torch.relu, [normal(3)], only=[]).rows
    everything = tried(torch.relu, [normal(3)], skip=(name for name in hazards() if name != "sliced"))
    assert [row.hazard for row in everything.rows] == ["sliced"]


def test_backends():
    def where(function, x=None, **options):
        report = check(function, [normal(3) if x is None else x], only="accuracy", progress=False, **options)
        assert report.passed
        return [row.backend for row in report.rows]

    gpu = ["gpu"] if torch.cuda.is_available() else []
    assert where(cupyops.relu) == ["reference", "simulator", *gpu]
    assert where(torch.relu, reference=torch.relu) == ["reference"]
    assert where(cupyops.relu, backends="simulator") == ["simulator"]
    assert where(cupyops.relu, backends=("simulator", "reference")) == ["simulator", "reference"]
    if gpu:
        assert where(cupyops.relu, normal(3).detach().cuda().requires_grad_()) == gpu
        assert where(torch.relu, normal(3).detach().cuda(), reference=torch.relu) == gpu


def test_an_operator_without_kernels_is_not_simulated():
    @cupyops.operator("cupyops_tests::check_without_kernels")
    def triple(x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    report = check(triple, [normal(3)], only="accuracy", backends=None, progress=False)
    assert [row.backend for row in report.rows][:1] == ["reference"]
    assert "simulator" not in {row.backend for row in report.rows}


def test_the_kernels_run_in_the_simulator_and_not_as_the_reference():
    def routed(x):
        with cupyops.trace() as trace:
            y = cupyops.relu(x)
        routes.append(trace.routes())
        return y

    for backend, route in (("simulator", {"simulator"}), ("reference", {"reference"})):
        routes = []
        assert only_row(routed, [normal(3)], backends=backend).verdict == "pass"
        assert routes and all(one == route for one in routes)


def test_the_seed_is_of_all_that_is_drawn(monkeypatch):
    seen = []

    def draws(case):
        seen.append(torch.randn(3, generator=case.generator()).tolist())

    put_in_place_of_all(monkeypatch, Hazard("draws", "", draws, ("reference",)))
    for seed in (0, 0, 7):
        assert tried(torch.relu, [normal(3)], seed=seed).seed == seed
    assert seen[0] == seen[1] != seen[2]


def test_a_row_says_what_must_happen_and_how_long_it_took():
    row = only_row(half_off, [normal(5)])
    assert row.expectation == hazards()["accuracy"].expectation
    assert 0 < row.seconds < 60


def always_raises(x):
    error = RuntimeError("out of order")
    error.add_note("a note of where")
    raise error


def test_where_the_plain_call_fails_accuracy_alone_says_so():
    report = tried(always_raises, [normal(3, 4)])
    assert [row.hazard for row in report.failures] == ["accuracy"]
    assert report.failures[0].reason == "RuntimeError: out of order\na note of where"
    others = [row for row in report.rows if row.hazard != "accuracy"]
    assert {row.hazard for row in others if row.verdict == "pass"} <= {"mixed_devices", "meta_tensors"}
    assert {"the call itself fails: RuntimeError: out of order"} < {row.reason for row in others}


def test_where_the_plain_call_is_wrong_no_other_hazard_fails():
    report = tried(half_off, [normal(3, 4)])
    assert [row.hazard for row in report.failures] == ["accuracy"], f"\n{report}"
    assert sum(row.verdict == "pass" for row in report.rows) > 30


def test_a_hazard_that_concerns_other_backends():
    row = only_row(torch.relu, [normal(3)], hazard="cuda_graph")
    assert (row.verdict, row.reason) == ("n/a", "concerns gpu")


def test_a_call_without_tensors():
    row = only_row(math.sqrt, [2.0], reference=math.sqrt)
    assert row.verdict in ("pass", "n/a")


def crop(image, boxes, *, scale=1.0):
    """Of an image, by whole numbers in a float tensor; other numbers are an error."""
    if not torch.equal(boxes.detach().double(), torch.tensor([1.0, 2.0, 4.0, 7.0], dtype=torch.float64)):
        raise RuntimeError(f"no box: {boxes}")
    top, left, bottom, right = boxes.long().tolist()
    return image[top:bottom, left:right] * scale


BOXES = torch.tensor([1.0, 2.0, 4.0, 7.0])


@pytest.mark.parametrize("keep", ["boxes", 1, ["boxes"], (1,)])
def test_values_that_are_kept(keep):
    """By every hazard but those of compilers, to which it is of no use that reads values."""
    options = dict(skip=[name for name, one in hazards().items() if family_of(one) == "compilers"], shrink=False)
    report = tried(crop, [normal(6, 8), BOXES], reference=lambda *args: crop(*args), keep=keep, **options)
    assert report.passed, f"\n{report}"
    redrawn = tried(crop, [normal(6, 8), BOXES], reference=lambda *args: crop(*args), **options)
    assert not redrawn.passed


@pytest.mark.parametrize("size", [3, 4, 7, 64, 300])
def test_shrunk_to_the_size_where_it_begins(size):
    row = only_row(half_off, [normal(size)])
    assert row.smallest == "(3,):(1,)"
    assert "error 0.5" in row.reason


def wide_rows(x):
    return torch.relu(x) + (0.5 if x.shape[1] >= 3 else 0.0)


def scaled(x, weight, size):
    y = x * weight
    return y + 0.5 if size >= 3 else y


def scaled_reference(x, weight, size):
    assert x.shape[-1] == weight.shape[0] == size
    return x * weight


def two_faults(x):
    """From ten elements on a wrong number, below that an exception: one is not shrunk to the other."""
    if x.numel() < 10:
        raise RuntimeError("too few")
    return torch.relu(x) + 0.5


@pytest.mark.parametrize(
    ("function", "args", "reference", "smallest", "reason"),
    [
        (wide_rows, [normal(5, 40, 6)], torch.relu, "(1, 3, 1):(3, 1, 1)", "error 0.5"),
        (scaled, [normal(4, 33), normal(33), 33], scaled_reference, "(1, 3):(3, 1), (3,):(1,), 3", "error 0.5"),
        # indices stay inside what has become smaller
        (lambda x, target: torch.nn.functional.cross_entropy(x, target) + 0.5, [normal(4, 9), torch.tensor([0, 8, 3, 5])],
         torch.nn.functional.cross_entropy, "(1, 1):(1, 1), (1,):(1,)", ""),
        (two_faults, [normal(64)], torch.relu, "(10,):(1,)", "error 0.5"),
    ],
    ids=["other dimensions", "one size wherever it is", "indices", "the same fault"],
)  # fmt: skip
def test_shrunk(function, args, reference, smallest, reason):
    row = only_row(function, args, reference=reference)
    assert row.verdict == "fail" and row.smallest == smallest and reason in row.reason


def test_no_shrinking():
    row = only_row(half_off, [normal(5, 40)], shrink=False)
    assert row.smallest == "(5, 40):(40, 1)" and "(5, 40)" in row.reproduction


def test_the_search_ends_in_time(monkeypatch):
    monkeypatch.setattr(shrink, "_SECONDS", 0.2)
    of = target.target(half_off, torch.relu)
    case = Case(of, Call(*[normal(n) for n in range(50, 150)]), "reference", Tolerance())
    made = []

    def slow(candidate):
        made.append(candidate)
        time.sleep(0.05)
        return True

    monkeypatch.setattr(shrink, "is_valid", lambda case, call: True)
    start = time.monotonic()
    shrink.smallest(case, slow)
    assert time.monotonic() - start < 2 and 2 <= len(made) <= 6


def test_the_search_ends_where_everything_fails():
    of = target.target(half_off, torch.relu)
    case = Case(of, Call(normal(7, 5, 3, 2)), "reference", Tolerance())
    assert repr(shrink.smallest(case, lambda candidate: True)) == "(1, 1, 1, 1):(1, 1, 1, 1)"
    assert shrink.smallest(case, lambda candidate: False) is case.call


def test_a_fault_that_comes_and_goes_keeps_its_reason(monkeypatch):
    calls = []

    def now_and_then(case):
        calls.append(case)
        if len(calls) <= 2:
            raise RuntimeError("bad luck")

    fault = Hazard("now_and_then", "", now_and_then, ("reference",))
    put_in_place_of_all(monkeypatch, fault)
    row = only_row(torch.relu, [normal(5, 4)], hazard=fault.name)
    assert (row.verdict, row.reason) == ("fail", "RuntimeError: bad luck")


def again(row):
    """The report of a row's line of Python, in a namespace as a user has it."""
    top = __name__.partition(".")[0]
    return eval(row.reproduction, {"cupyops": cupyops, "torch": torch, "math": math, top: sys.modules[top]})


def assert_fails_again(row):
    assert row.verdict == "fail"
    report = again(row)
    assert [(one.hazard, one.backend, one.verdict) for one in report.rows] == [(row.hazard, row.backend, "fail")]
    return report.rows[0]


def keeps_nan_out(x):
    return torch.relu(x.nan_to_num(0.0))


def keeps_denormals_out(x):
    return torch.where(x.detach().abs() < torch.finfo(x.dtype).tiny, 0.0, torch.relu(x))


def coarse(x):
    return torch.relu(x).float().to(x.dtype)


def needs_rows(x):
    """Wrong unless the last dimension is the dense one."""
    return torch.relu(x) + (0.0 if x.dim() < 2 or x.stride(-1) == 1 else 0.5)


def wrong_from_an_odd_place(x):
    return torch.relu(x) + (0.5 if x.storage_offset() % 2 else 0.0)


def wrong_where_expanded(x):
    return torch.relu(x) + (0.5 if 0 in x.stride() else 0.0)


# values that stay as they are when drawn anew, and others that must be written out
@pytest.mark.parametrize(
    ("function", "x", "written"),
    [
        (half_off, normal(3, 5), "tensor((3, 1), 'float32', 1, requires_grad=True)"),
        (half_off, normal(7, dtype=torch.float16, requires_grad=False), "tensor((3,), 'float16', 1)"),
        (keeps_nan_out, torch.tensor([math.nan, 1.0, -math.inf]), "torch.tensor([math.nan], dtype=torch.float32)"),
        (
            keeps_denormals_out,
            torch.tensor([2.0, 3e-40]).requires_grad_(),
            "e-40], dtype=torch.float32).requires_grad_()",
        ),
        (coarse, torch.tensor([1.0 + 1e-12], dtype=torch.float64), "tensor((1,), 'float64', 1)"),
        (
            keeps_denormals_out,
            torch.tensor([3e-310], dtype=torch.float64),
            "torch.tensor([3e-310], dtype=torch.float64)",
        ),
        (needs_rows, normal(4, 3).detach().t(), "'float32', 1, strides=(1, "),
        (wrong_from_an_odd_place, normal(5).detach()[1:], "offset=1"),
        (wrong_from_an_odd_place, normal(400).detach()[203:], "offset=75"),
        (wrong_where_expanded, normal(3, 1).detach().expand(3, 4), "strides=(1, 0)"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_line_of_a_function(function, x, written):
    row = only_row(function, [x], shrink=function in (half_off, keeps_nan_out))
    assert written in row.reproduction
    assert f"test_check.{function.__name__}, [" in row.reproduction and "reference=torch.relu" in row.reproduction
    assert_fails_again(row)


def nan_in_rows(x):
    return needs_rows(x) if x.isnan().any() else torch.relu(x)


def ignores_weight(x, target, weight=None, *, smoothing=0.0, limit=math.inf):
    """Wrong for class 2, and for anything but the defaults."""
    y = ignores_weight_reference(x, target, weight, smoothing=smoothing)
    return y + 0.5 if weight is None and math.isinf(limit) and bool((target == 2).any()) else y


def ignores_weight_reference(x, target, weight=None, *, smoothing=0.0, limit=math.inf):
    return torch.nn.functional.cross_entropy(x, target, weight, label_smoothing=smoothing)


def wrong_stack(tensors, options, dtype=None):
    return right_stack(tensors, options, dtype) + 0.5


def right_stack(tensors, options, dtype=None):
    (first, second), scale = tensors, options["scale"]
    return torch.add(first, second["second"], alpha=scale[0]).to(dtype)


def wrong_product(x, y):
    return x * y + (0.5 if torch.equal(x, y) else 0.0)


def wrong_on_complex(x):
    return x * (2 if x.isnan().any() else 1)


def nan_and_an_empty_tensor(x, empty):
    return keeps_nan_out(x) + empty.sum()


def nan_and_an_empty_tensor_reference(x, empty):
    assert empty.shape == (0, 3)
    return torch.relu(x) + empty.sum()


def wrong_crop(image, boxes):
    return crop(image, boxes) + 1


TWICE = normal(3)
STACK = [[normal(3), {"second": normal(3, seed=1)}], {"scale": (2, None)}]
THREE_NUMBERS = "cupyops.testing.tensor((3,), 'float32', 1, requires_grad=True)"
LINES = {
    "transposed": (nan_in_rows, [torch.tensor([[1.0, math.nan], [2.0, -math.inf]]).t()], {},
                   ["math.nan, 2.0, -math.inf], dtype=torch.float32).as_strided"]),
    "slice": (nan_in_rows, [torch.tensor([[9.0, 9.0], [1.0, math.nan]], dtype=torch.float64)[1:].t()], {},
              ["[0] * 2 + [1.0, math.nan]"]),
    "expanded": (nan_in_rows, [torch.tensor([[math.nan], [2.0]]).expand(2, 3)], {},
                 ["[math.nan, 2.0], dtype=torch.float32).as_strided((2, 3), (1, 0))"]),
    "lists": (wrong_stack, STACK, {"kwargs": {"dtype": torch.float32}, "reference": right_stack, "shrink": True},
              ["{'scale': (2, None)}], {'dtype': torch.float32}, reference=", "[[cupyops.testing.tensor(",
               "{'second': cupyops.testing.tensor("]),
    "twice": (wrong_product, [TWICE, TWICE], {"reference": torch.mul}, [f"{THREE_NUMBERS}, {THREE_NUMBERS}"]),
    "complex": (wrong_on_complex, [torch.tensor([complex(math.nan, -1.0), complex(2.0, math.inf)])],
                {"reference": torch.clone}, ["[complex(math.nan, -1.0), complex(2.0, math.inf)], dtype=torch.complex64"]),
    "empty": (nan_and_an_empty_tensor, [torch.tensor([math.nan]), torch.zeros(0, 3)],
              {"reference": nan_and_an_empty_tensor_reference},
              ["[torch.tensor([math.nan], dtype=torch.float32), cupyops.testing.tensor((0, 3), "]),
    "kept": (wrong_crop, [normal(6, 8), BOXES], {"reference": crop, "keep": "boxes"},
             ["torch.tensor([1.0, 2.0, 4.0, 7.0], dtype=torch.float32)", "keep=[1])"]),
    "keyword arguments": (ignores_weight, [normal(4, 5), torch.tensor([2, 2, 1, 2]), None],
                          {"kwargs": {"smoothing": 0.25, "limit": -math.inf},
                           "reference": ignores_weight_reference, "shrink": True},
                          [", None], {'smoothing': 0.25, 'limit': -math.inf}, reference=", "'int64', 2, high="]),
    # its own reference would find nothing
    "of an operator": (cupyops.relu, [normal(3)], {"reference": torch.nn.functional.silu, "backends": "reference"},
                       ["cupyops.testing.check(cupyops.relu, [", "reference=torch.nn.functional.silu"]),
}  # fmt: skip


@pytest.mark.parametrize(("function", "args", "options", "written"), LINES.values(), ids=LINES)
def test_the_line_has_all_of_the_call(function, args, options, written):
    row = only_row(function, args, **{"shrink": False, **options})
    assert all(text in row.reproduction for text in written), row.reproduction
    assert_fails_again(row)


def test_too_many_values_are_not_written_out():
    x = normal(65).detach().index_fill(0, torch.tensor([0]), math.nan)
    row = only_row(keeps_nan_out, [x], shrink=False)
    assert "[<the sample's (65,)>]" in row.reproduction
    assert "[math.nan]" in only_row(keeps_nan_out, [x]).reproduction  # the smallest call has few


rough_double = doubling("check_rough", DOUBLE.replace("2.0f * x[i]", "(i < 2 ? 2.0f : 3.0f) * x[i]"))


@cupyops.operator("cupyops_tests::check_named")
def named(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


named.forward(lambda x: (3 * x, ()))
named.backward(lambda saved, grad_y: 2 * grad_y)


@pytest.mark.parametrize(
    ("operator", "text", "smallest"),
    [
        (named, "test_check.named, [", "(1, 1)"),
        (rough_double, "operators()['cupyops_tests::check_rough'], [", "(3, 1)"),
    ],
)
def test_the_line_of_an_operator_whose_kernel_is_wrong(operator, text, smallest):
    """By its name in its module, or else by the one it is registered with."""
    report = check(operator, [normal(4, 5)], only="accuracy", progress=False)
    assert [row.verdict for row in report.rows][:2] == ["pass", "fail"]
    row = report.rows[1]
    assert row.smallest.startswith(smallest)
    assert "reference=" not in row.reproduction and text in row.reproduction
    assert_fails_again(row)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (torch.softmax, "torch.softmax"),
        (torch.nn.functional.gelu, "torch.nn.functional.gelu"),
        (torch.nn.functional.layer_norm, "torch.nn.functional.layer_norm"),
        (torch.special.erf, "torch._C._special.special_erf"),
        (torch.Tensor.relu, "torch.Tensor.relu"),
        (torch.ops.aten.relu, "torch.ops.aten.relu"),
        (cupyops.softmax, "cupyops.softmax"),
        (torch.nn.ReLU(), "<ReLU>"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_where_a_reference_is_found(function, text):
    from cupyops.testing.reproduce import _callable

    assert _callable(function) == text
    if "<" not in text:
        assert eval(text, {"torch": torch, "cupyops": cupyops}) is function


def test_a_function_of_the_main_program(monkeypatch):
    """It stands there by its bare name."""
    from cupyops.testing.reproduce import _callable

    def mine(x):
        return x

    mine.__module__, mine.__qualname__ = "__main__", "mine"
    monkeypatch.setattr(sys.modules["__main__"], "mine", mine, raising=False)
    assert _callable(mine) == "mine"


def slightly_off(x):
    return torch.relu(x) * (1 + 3e-7)


def test_the_seed_and_the_tolerance_are_in_the_line():
    tight = Tolerance(factor=0.0, ulps={torch.float32: 0.5})
    assert only_row(slightly_off, [normal(3)], tolerance=Tolerance(ulps={torch.float32: 8.0})).verdict == "pass"
    row = only_row(slightly_off, [normal(3)], tolerance=tight, seed=5)
    assert "tolerance=cupyops.testing.Tolerance(factor=0.0, ulps={torch.float32: 0.5})" in row.reproduction
    assert row.reproduction.endswith("seed=5)")
    assert "0.5" not in assert_fails_again(row).verdict
    assert again(row).seed == 5


def test_a_hazard_other_than_accuracy_fails_again():
    row = only_row(needs_rows, [normal(4, 5)], hazard="transposed")
    assert "only='transposed'" in row.reproduction
    assert_fails_again(row)


def test_every_kind_of_attempt():
    """(verdict, reason, kind): a Failure and an exception fail, NotApplicable does not."""

    def hazard_of(error):
        def raises(case):
            raise error

        return Hazard("raises", "", raises, ("reference",))

    case = Case(target.target(torch.relu, torch.relu), Call(normal(3)), "reference", Tolerance())
    assert attempt(hazard_of(NotApplicable("why")), case) == ("n/a", "why", None)
    assert attempt(hazard_of(KeyError("k")), case) == ("fail", "KeyError: 'k'", KeyError)
    assert attempt(Hazard("gpu_only", "", lambda case: None, ("gpu",)), case) == ("n/a", "concerns gpu", None)


def test_the_order_of_the_hazards_is_the_same_whatever_was_imported_first(monkeypatch):
    usual = list(hazards())
    module = sys.modules[Hazard.__module__]
    shuffled = sorted(module._hazards.items(), key=lambda item: FAMILIES.index(family_of(item[1])), reverse=True)
    monkeypatch.setattr(module, "_hazards", dict(shuffled))
    assert list(module._hazards) != usual
    assert list(hazards()) == usual and usual[0] == "accuracy"
