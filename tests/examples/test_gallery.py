"""Each program of the gallery does its task, and its operator keeps the contract."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from cupyops.testing import check

GALLERY = Path(__file__).resolve().parents[2] / "examples" / "gallery"
NAMES = sorted(path.stem for path in GALLERY.glob("*.py"))


@pytest.fixture(scope="module")
def load():
    """The program as a module, loaded once."""
    known = {}

    def loaded(name):
        if name not in known:
            spec = importlib.util.spec_from_file_location(f"gallery_{name}", GALLERY / f"{name}.py")
            known[name] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(known[name])
        return known[name]

    return loaded


def errors(text):
    return [float(one) for one in re.findall(r"error ([\d.]+)", text)]


# what is printed, looked at
TASKS = {
    "bilateral": lambda text: errors(text)[2] < errors(text)[1] / 2 < errors(text)[0] / 4,
    "diffuse": lambda text: text.count("heat -6.000") == 3 and text.count("@") == 12,
    "farthest": lambda text: "largest gap is 5.11" in text and "largest gap is 0.77" in text and text.count("o") > 20,
    "label": lambda text: "4 components: A of 54, B of 24, C of 4, D of 6" in text,
    "scan": lambda text: errors(text)[1] < 0.01 < 0.3 < errors(text)[0],
    "smooth": lambda text: errors(text)[1] < errors(text)[0] and "0.72 of the slow signal, 0.25 of the fast" in text,
    "soup": lambda text: errors(text)[1] < 0.01 < errors(text)[0],
    "spheres": lambda text: text.count("@") > 20 and len(text.splitlines()) == 20,
    "splat": lambda text: errors(text)[1] < 0.1 < errors(text)[0] and "#" in text,
    "suppress": lambda text: "3 peaks: [(25, 2), (6, 3), (17, 6)]" in text and text.count("X") == 3,
}


@pytest.mark.parametrize("name", NAMES)
def test_it_does_its_task(load, name, capsys):
    load(name).main()
    assert TASKS[name](capsys.readouterr().out)


def leaf(*shape, low=0.0, high=1.0):
    return (low + (high - low) * torch.rand(shape)).requires_grad_()


CALLS = {
    "bilateral": lambda: [leaf(7, 6), 2, 1.5, 0.3],
    "farthest": lambda: [leaf(3, 150, 3).detach(), 9],
    "label": lambda: [torch.rand(9, 8) < 0.6],
    "scan": lambda: [leaf(6, 5), leaf(6, 5), leaf(5, 3, low=-1.0, high=0.0), leaf(6, 3), leaf(6, 3)],
    "soup": lambda: [[leaf(3, 5) for _ in range(3)], leaf(3)],
    "splat": lambda: [leaf(20, 2, high=4.0).detach(), leaf(20), 6, 5],
    "smooth": lambda: [leaf(7, 3), leaf(3)],
    "suppress": lambda: [leaf(30, 2).detach(), leaf(30).detach(), 0.2],
    "diffuse": lambda: [leaf(6, 7).detach(), 3],
}
ROWS = ["accuracy", "strided", "partial_gradients", "deterministic", "compile_fullgraph", "guard_zones"]


@pytest.mark.parametrize("name", CALLS)
def test_its_operator(load, name):
    torch.manual_seed(0)
    module = load(name)
    operator = getattr(module, "diffuse_" if name == "diffuse" else name)
    report = check(operator, CALLS[name](), only=ROWS, backends="simulator", keep="at" if name == "splat" else None)
    report.raise_if_failed()
    (row,) = [row for row in report.rows if row.hazard == "deterministic"]
    assert (row.verdict, "atomicAdd" in row.reason) == (("n/a", True) if name == "splat" else ("pass", False))


def test_the_gradient_of_what_is_changed_in_place(load):
    diffuse_ = load("diffuse").diffuse_
    plate = torch.rand(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: diffuse_(2 * x, 2), (plate,))


def test_pictures_of_spheres_are_right(load):
    """Where a ray meets one, in float64 and by other means: the discriminant of the quadratic."""
    import cupyops

    module = load("spheres")
    scene = [((0.1, 0.2, 0.3), 0.8), ((-0.9, 0.4, -0.5), 0.5)]
    with cupyops.simulate():
        image = module.render(scene, 24, 12, "cpu")
    y, x = torch.meshgrid(torch.arange(12.0).double(), torch.arange(24.0).double(), indexing="ij")
    ray = torch.stack([(x + 0.5 - 12) / 12 / 2, (6 - y - 0.5) / 12, torch.full_like(x, 1.2)], -1)
    met = torch.zeros(12, 24, dtype=torch.bool)
    for centre, radius in scene:
        c = torch.tensor(centre).double() - torch.tensor([0.0, 0.0, -4.0])
        met |= (ray @ c) ** 2 >= ray.square().sum(-1) * ((c @ c) - radius**2)
    assert torch.equal(image > 0, met) and met.any() and not met.all()


SIZES = {
    "bilateral": [(1, 1, 3), (1, 9, 2), (17, 33, 1), (5, 4, 7)],  # height, width, radius
    "scan": [(1, 1, 1), (5, 70, 16), (0, 3, 2), (33, 1, 4)],  # steps, channels, states
}


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in SIZES.items() for size in sizes])
def test_odd_sizes(load, name, size):
    """Values and gradients in float64, by autograd."""
    import cupyops

    torch.manual_seed(1)
    if name == "scan":
        steps, channels, states = size
        args = [leaf(steps, channels, low=-1.0), leaf(steps, channels), leaf(channels, states, low=-1.0, high=0.0)]
        args, rest = [*args, leaf(steps, states, low=-1.0), leaf(steps, states, low=-1.0)], ()
    else:
        args, rest = [leaf(*size[:2])], (size[2], 1.2, 0.3)
    operator = getattr(load(name), name)
    exact = [one.detach().double().requires_grad_() for one in args]
    truth = operator.reference(*exact, *rest)
    with cupyops.simulate():
        y = operator(*args, *rest)
        grad_y = torch.rand_like(y)
        torch.testing.assert_close(y, truth.float())
        found = torch.autograd.grad(y, args, grad_y)
    for a, b in zip(found, torch.autograd.grad(truth, exact, grad_y.double(), allow_unused=not y.numel())):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b.float(), rtol=2e-5, atol=2e-5)


def test_components_are_those_of_scipy(load):
    import cupyops

    ndimage = pytest.importorskip("scipy.ndimage")
    torch.manual_seed(0)
    for density in (0.0, 0.4, 0.6, 1.0):
        mask = torch.rand(23, 41) < density
        with cupyops.simulate():
            found = load("label").label(mask)
        expected, count = ndimage.label(mask.numpy())
        pairs = set(zip(found.flatten().tolist(), expected.flatten().tolist()))
        assert len({one for one, _ in pairs}) == len({other for _, other in pairs}) == len(pairs)  # one to one
        assert len({one for one, _ in pairs} - {0}) == count and bool(((found == 0) == ~mask).all())


@pytest.mark.parametrize(("points", "count"), [(1, 1), (129, 129), (300, 40)])
def test_of_equally_far_points_the_first_is_taken(load, points, count):
    """Of a grid many are; and each choice is a farthest one, measured anew in float64."""
    import cupyops

    torch.manual_seed(0)
    clouds = torch.randint(0, 4, (2, points, 3)).float()
    with cupyops.simulate():
        chosen = load("farthest").farthest(clouds, count)
    for cloud, taken in zip(clouds.double(), chosen.tolist()):
        for k in range(1, count):
            far = torch.cdist(cloud, cloud[taken[:k]]).amin(1)
            assert taken[k] == (far >= far.max() - 1e-9).nonzero()[0]


def test_the_list_names_every_program():
    text = (GALLERY / "README.md").read_text()
    assert sorted(re.findall(r"\[(\w+)\.py\]", text)) == NAMES == sorted(TASKS)
