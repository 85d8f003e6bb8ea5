"""attention by a map of its mask: panels that a tile does not see are left out, in both engines and every role."""

import pytest
import torch
from attentions import CARDS, compare
from selection import slow

import cupyops
from cupyops._dispatch.attention.attention import Blocks
from cupyops._dispatch.core.gpu import assume_gpu
from cupyops._expression.scores import scores, spelled

ENGINES = {
    "mma": ("sm_80", 64, ("forward:mma", "backward:mma_64")),
    "mma_32": ("sm_80", 128, ("forward:mma", "backward:mma_32")),
    "mma_16": ("sm_80", 136, ("forward:mma", "backward:mma_16")),
    "mma_once": ("sm_80", 64, ("forward:mma", "backward:mma_once")),
    "wgmma": ("sm_90", 128, ("forward:wgmma", "backward:wgmma")),
    "wgmma_64": ("sm_90", 64, ("forward:wgmma", "backward:wgmma")),
    "once": ("sm_90", 128, ("forward:wgmma", "backward:wgmma_once")),
    "once_64": ("sm_90", 64, ("forward:wgmma", "backward:wgmma_once")),
}
QUERIES, KEYS, HEADS = 210, 270, 2
ROWS, COLUMNS = torch.arange(QUERIES)[:, None], torch.arange(KEYS)
DOCUMENTS = (torch.arange(KEYS) // 90).int()
BY_BATCH = torch.stack([torch.arange(KEYS) // 128, torch.arange(KEYS) // 33])
REACH = torch.tensor([0, 40])
OF_HEADS = torch.arange(HEADS)[:, None, None]

# name: (what attention is given, which keys are seen, other options)
MASKS = {
    "documents": ({"mask": "of[q] == of[k]", "of": DOCUMENTS}, DOCUMENTS[:QUERIES, None] == DOCUMENTS, {}),
    "documents of a batch": (
        {"mask": "of[b, q] == of[b, k]", "of": BY_BATCH},
        (BY_BATCH[:, :QUERIES, None] == BY_BATCH[:, None])[:, None],
        {"causal": "top_left"},
    ),
    "reach of a head": (  # of the heads that share keys each sees others, one of them none
        {"mask": "q - k < reach[h] && k - q < reach[h]", "reach": REACH},
        (ROWS - COLUMNS).abs() < REACH[OF_HEADS],
        {},
    ),
    "with a score": (
        {"score": "s * 2", "mask": "of[q] == of[k] || k == 0", "of": DOCUMENTS},
        (DOCUMENTS[:QUERIES, None] == DOCUMENTS) | (COLUMNS == 0),
        {"window": (100, 30)},
    ),
    "nothing": ({"mask": "k % 2 == 2"}, torch.zeros(QUERIES, KEYS, dtype=torch.bool), {}),
    "everything": ({"mask": "k * q >= 0"}, torch.ones(QUERIES, KEYS, dtype=torch.bool), {"causal": "bottom_right"}),
}


def compared(name, engine, dtype=torch.float16, device="cpu"):
    _, width, forms = ENGINES[engine]
    given, seen, options = MASKS[name]
    variant = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in given.items()}
    change = (lambda s: s * 2) if "score" in given else None
    shape = (2 if name == "documents of a batch" else 1, HEADS, 1, QUERIES, KEYS, width)
    return compare(shape, dtype, device, forms=forms, seen=seen, variant=variant, change=change, **options)


CASES = pytest.mark.parametrize(
    "name, engine",
    [
        (name, engine)
        for name in MASKS
        for engine in ENGINES
        if engine in ("mma", "mma_once", "wgmma", "once") or name == "reach of a head"
    ],
)


@pytest.mark.slow
@CASES
def test_maps(name, engine):
    with cupyops.simulate(ENGINES[engine][0]), cupyops.trace() as trace:
        compared(name, engine)
    launched = [record.kernel.partition("<")[0] for record in trace.launches()]
    roles = 1 if "once" in engine else 2
    assert launched.count("attention_map_lists") == 1 + roles and launched.count("attention_map_cells") == 2
    assert sum(kernel.endswith("_variant") for kernel in launched) == 1 + roles


@pytest.mark.gpu
@CASES
def test_maps_on_a_gpu(name, engine):
    if engine.startswith(("wgmma", "once")) and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    compared(name, engine, torch.bfloat16 if engine == "wgmma" else torch.float16, "cuda")


@pytest.mark.parametrize("engine", [*slow("mma"), "wgmma"])
def test_panels_that_nobody_sees_are_not_computed(engine):
    """What is infinite there would make NaN of 0 times it."""
    q, k, v = (torch.randn(1, 1, rows, 64).half() for rows in (256, 512, 512))
    k[:, :, 256:], v[:, :, 256:] = torch.inf, torch.inf
    given = [x.requires_grad_() for x in (q, k, v)]
    of = torch.arange(512) // 256
    arch = ENGINES[engine][0]
    with cupyops.simulate(arch), assume_gpu(**CARDS[arch]):
        y = cupyops.attention(*given, mask="of[k] == 0 && of[q] == 0", of=of)
        grads = torch.autograd.grad(y.sum(), given)
    assert all(x.isfinite().all() for x in (y, *grads))
    assert not grads[1][:, :, 256:].any() and not grads[2][:, :, 256:].any()


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("cell", [(64, 64), (64, 32), (32, 128)], ids=str)
def test_lists(cell, keys):
    """Of each tile the panels with a score that is seen, in order, and whether all of theirs are."""
    from cupyops._dispatch.attention.attention import problem
    from cupyops._dispatch.attention.map import Maps

    q, k = torch.empty(1, 2, QUERIES, 64).half(), torch.empty(1, 2, KEYS, 64).half()
    blocks = Blocks(128, 64 if cell[0] != 32 else 96, keys, cell)
    found = scores(spelled(None, "of[q] == of[k]", ["of"]), (DOCUMENTS,))
    with cupyops.simulate():
        _, masked = found.bound([], [DOCUMENTS])
        lists, strides = Maps(problem(q, k, k, q, None, 20), masked, q.device).lists(blocks)
    assert strides[:2] == (0, 0) and lists.shape[:2] == (1, 1)
    within = COLUMNS - ROWS <= 20
    seen = (DOCUMENTS[:QUERIES, None] == DOCUMENTS) & within
    hidden = ~(DOCUMENTS[:QUERIES, None] == DOCUMENTS) & within
    if keys:
        seen, hidden = seen.mT, hidden.mT

    def wide(of, start, rows, step):  # the rows of the cells that are touched
        return slice(start // step * step, -(-(start + rows) // step) * step)

    own, other = reversed(cell) if keys else cell
    for tile, (count, *entries) in enumerate(lists[0, 0].tolist()):
        rows = wide(seen, tile * blocks.rows, blocks.rows, own)
        expected = []
        for panel in range(-(-seen.shape[1] // blocks.panel)):
            columns = wide(seen, panel * blocks.panel, blocks.panel, other)
            if seen[rows, columns].any():
                expected.append(2 * panel + int(hidden[rows, columns].any()))
        assert entries[:count] == expected


@pytest.mark.parametrize(
    "mask, shapes, expected",
    [
        ("of[q] == of[k]", {"of": (9,)}, (False, False)),
        ("of[b, q] == of[b, k]", {"of": (2, 9)}, (True, False)),
        ("of[b, q] == of[b, k]", {"of": (1, 9)}, (False, False)),
        ("n[h] < q % 3", {"n": (4,)}, (False, True)),
        ("n[b + h] < q % 3", {"n": (4,)}, (True, True)),
        ("q % (h + 1) == 0", {}, (False, True)),
        ("m[b, h, q, k]", {"m": (1, 1, 5, 5)}, (False, False)),
        ("m[b, h, q, k]", {"m": (2, 1, 5, 5)}, (True, False)),
        ("m[b, h, q, k]", {"m": (2, 4, 5, 5)}, None),  # as many bytes to read as it could save
        ("m[b, h, q]", {"m": (2, 4, 5)}, (True, True)),
        ("k <= q", {}, None),  # bounds
    ],
)
def test_what_maps_are_shared_by(mask, shapes, expected):
    """A map for each batch and head only where the mask tells them apart, by its text and the sizes of tensors."""
    tensors = [torch.ones(shape, dtype=torch.int32) for shape in shapes.values()]
    _, masked = scores(spelled(None, mask, list(shapes)), tensors).bound([], tensors)
    assert (None if masked is None else (masked.by_batch, masked.by_head)) == expected


def test_a_change_in_place_is_seen():
    """A map is of one call: the tensor that a mask names may be another at the next, also where a plan replays."""
    q, k, v = (torch.randn(1, 1, 150, 64).half() for _ in range(3))
    of = torch.arange(150) // 50
    for step in range(6):
        of.copy_(torch.arange(150) // (20 + step))
        with cupyops.simulate("sm_80"):
            y = cupyops.attention(q, k, v, mask="of[q] == of[k]", of=of)
        mask = of[:, None] == of
        right = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)
        assert (y - right).abs().max() <= 4e-3 * right.abs().max(), step


def test_masks_of_bools_of_pytorch():
    """Where heads share a mask, its bytes are read once for all of them."""
    q, k, v = (torch.randn(1, 4, 150, 64).half() for _ in range(3))
    mask = torch.block_diag(*(torch.ones(50, 50) for _ in range(3))).bool()
    for given, maps in ((mask, 1), (mask.expand(1, 4, 150, 150), 1), (mask.repeat(1, 4, 1, 1), 0)):
        with cupyops.simulate("sm_80"), cupyops.trace() as trace:
            y = cupyops.scaled_dot_product_attention(q, k, v, given)
        right = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)
        assert (y - right).abs().max() <= 4e-3 * right.abs().max()
        assert sum(record.kernel.startswith("attention_map_cells") for record in trace.launches()) == maps
