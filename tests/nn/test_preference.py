"""Losses of preferences, policies and distillation against the papers' formulas, on all logits and in float64."""

import pytest
import torch
from torch.nn import functional as F

import cupyops
from cupyops.nn import linear_log_prob, linear_loss
from cupyops.nn.preference import dpo, grpo, jsd, kto, orpo

PAIRS, TOKENS, WIDTH, CLASSES = 3, 6, 8, 17


@pytest.fixture
def drawn(device):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    return draw


@pytest.fixture
def answers(device, drawn):
    """Hidden states, targets of which some are ignored, and a head; with the log-probabilities by plain PyTorch."""
    generator = torch.Generator().manual_seed(1)
    weight, made = drawn(CLASSES, WIDTH), []
    for _ in range(2):
        x = drawn(PAIRS, TOKENS, WIDTH)
        target = torch.randint(CLASSES, (PAIRS, TOKENS), generator=generator)
        target[0, 3:], target[2, :2] = -100, -100
        made.append((x, target.to(device)))
    return weight, made


def by_hand(x, weight, target):
    """What is ignored is 0."""
    probabilities = F.log_softmax(x @ weight.t(), -1)
    found = probabilities.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return found * (target != -100)


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def compare(ours, known, mine, theirs):
    """The loss and its gradients."""
    torch.testing.assert_close(ours, known)
    ours.backward()
    known.backward()
    torch.testing.assert_close([one.grad for one in mine], [one.grad for one in theirs])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo(answers, drawn, smoothing):
    """From the hidden states on."""
    weight, ((x, target), (z, other)) = answers
    references = [drawn(PAIRS, TOKENS) * (t != -100) for t in (target, other)]
    mine, theirs = leaves(weight, x, z), leaves(weight, x, z)
    chosen, rejected = linear_log_prob(mine[1], mine[0], target), linear_log_prob(mine[2], mine[0], other)
    ours = dpo(chosen, rejected, *references, beta=0.3, label_smoothing=smoothing)
    policy = by_hand(theirs[1], theirs[0], target).sum(1) - by_hand(theirs[2], theirs[0], other).sum(1)
    margin = 0.3 * (policy - (references[0] - references[1]).sum(1))
    known = (1 - smoothing) * torch.log1p((-margin).exp()) + smoothing * torch.log1p(margin.exp())
    compare(ours, known.mean(), mine, theirs)


def test_orpo(answers):
    weight, ((x, target), (z, other)) = answers
    mine, theirs = leaves(weight, x, z), leaves(weight, x, z)
    masks = [t != -100 for t in (target, other)]
    chosen, rejected = linear_log_prob(mine[1], mine[0], target), linear_log_prob(mine[2], mine[0], other)
    ours = orpo(chosen, rejected, *masks, beta=0.3)
    tokens = [by_hand(theirs[1], theirs[0], target), by_hand(theirs[2], theirs[0], other)]
    p, q = ((one.sum(1) / mask.sum(1)).exp() for one, mask in zip(tokens, masks))
    odds = (p / (1 - p)) / (q / (1 - q))
    known = -tokens[0].sum() / masks[0].sum() + 0.3 * torch.log1p(1 / odds).mean()
    compare(ours, known, mine, theirs)


def test_orpo_of_probabilities_near_one_and_zero():
    mask = torch.ones(4, 1, dtype=torch.bool)
    mine = leaves(torch.tensor([[-1e-12], [-1e-5], [-0.6931], [-60.0]], dtype=torch.float64))
    loss = orpo(mine[0], torch.full_like(mine[0], -2.0), mask, mask)
    loss.backward()
    assert loss.isfinite() and mine[0].grad.isfinite().all()


def test_kto(answers, drawn, device):
    weight, ((x, target), _) = answers
    reference = drawn(PAIRS, TOKENS) * (target != -100)
    good = torch.tensor([True, False, True], device=device)
    for kl in (0.0, 0.7, torch.tensor(-0.5), torch.tensor(0.3)):
        mine, theirs = leaves(weight, x), leaves(weight, x)
        ours = kto(linear_log_prob(mine[1], mine[0], target), reference, good, kl, 0.3, 1.5, 0.5)
        reward = 0.3 * (by_hand(theirs[1], theirs[0], target) - reference).sum(1)
        zero = 0.3 * max(float(kl), 0.0)
        losses = [
            1.5 / (1 + (r - zero).exp()) if is_good else 0.5 / (1 + (zero - r).exp())
            for r, is_good in zip(reward, good)
        ]
        compare(ours, torch.stack(losses).mean(), mine, theirs)


@pytest.mark.parametrize("per", ["sequence", "token"])
@pytest.mark.parametrize("reference", [True, False])
def test_grpo(answers, drawn, per, reference):
    """Token by token; with ratios beyond both ends of the clip, and advantages of both signs."""
    weight, ((x, target), _) = answers
    mask, advantage = target != -100, drawn(PAIRS)
    mine, theirs = leaves(weight, x), leaves(weight, x)
    policy, known = linear_log_prob(mine[1], mine[0], target), by_hand(theirs[1], theirs[0], target)
    old = known.detach() + 0.5 * drawn(PAIRS, TOKENS)
    old[~mask] = torch.nan  # of no account
    other = known.detach() + drawn(PAIRS, TOKENS) if reference else None
    ours = grpo(policy, old, advantage, mask, other, epsilon=0.1, epsilon_high=0.3, beta=0.05, per=per)
    rows, clipped = [], set()
    for i in range(PAIRS):
        row = []
        for j in (j for j in range(TOKENS) if mask[i, j]):
            ratio, a = (known[i, j] - old[i, j]).exp(), advantage[i]
            bound = min(max(ratio.item(), 0.9), 1.3)
            clipped.add((bound == ratio.item(), bool(a > 0)))
            one = -torch.minimum(ratio * a, ratio * a if bound == ratio.item() else bound * a)
            if reference:
                d = other[i, j] - known[i, j]
                one = one + 0.05 * (d.exp() - d - 1)
            row.append(one)
        rows.append(torch.stack(row))
    assert len(clipped) >= 3
    total = torch.cat(rows).mean() if per == "token" else torch.stack([row.mean() for row in rows]).mean()
    compare(ours, total, mine, theirs)


def test_grpo_of_advantages_of_tokens(answers, drawn):
    _, ((_, target), _) = answers
    policy, mask, advantage = drawn(PAIRS, TOKENS), target != -100, drawn(PAIRS)
    one = grpo(policy, policy, advantage, mask)
    assert one == grpo(policy, policy, advantage.unsqueeze(1).expand(-1, TOKENS), mask)
    torch.testing.assert_close(one, -advantage.mean())


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("masked", [True, False])
def test_jsd(answers, drawn, beta, masked, monkeypatch):
    """Of heads of different widths; in chunks, and the teacher gets no gradient."""
    monkeypatch.setattr(linear_loss, "MOST_LOGITS", 10 * CLASSES)
    weight, ((x, target), _) = answers
    teacher, other = leaves(drawn(PAIRS, TOKENS, 5), drawn(CLASSES, 5))
    biases = drawn(CLASSES), drawn(CLASSES)
    mask = target != -100 if masked else None
    mine, theirs = leaves(weight, x, biases[0]), leaves(weight, x, biases[0])
    options = {"student_bias": mine[2], "teacher_bias": biases[1], "temperature": 1.7}
    ours = jsd(mine[1], mine[0], teacher, other, mask, beta, **options)
    q = F.softmax((theirs[1] @ theirs[0].t() + theirs[2]) / 1.7, -1)
    p = F.softmax((teacher.detach() @ other.detach().t() + biases[1]) / 1.7, -1)
    kl = lambda a, b: (a * (a / b).log()).sum(-1)
    if beta in (0.0, 1.0):
        each = kl(p, q) if beta == 0 else kl(q, p)
    else:
        each = beta * kl(p, beta * p + (1 - beta) * q) + (1 - beta) * kl(q, beta * p + (1 - beta) * q)
    compare(ours, each[mask].mean() if masked else each.mean(), mine, theirs)
    assert teacher.grad is None and other.grad is None


def test_jsd_of_half_types(answers):
    """Products in bf16, all else in fp32."""
    weight, ((x, _), (z, _)) = answers
    half = [one.bfloat16().requires_grad_() for one in (x, weight)]
    loss = jsd(*half, z.bfloat16(), weight.bfloat16())
    loss.backward()
    exact = [one.detach().double().requires_grad_() for one in half]
    known = jsd(*exact, z.bfloat16().double(), weight.bfloat16().double())
    known.backward()
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.double(), known, rtol=0.02, atol=1e-3)
    for one, other in zip(half, exact):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=0.05, atol=2e-3)


def test_errors():
    x, other, mask = torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3, dtype=torch.bool)
    hidden, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    calls = [
        (lambda: dpo(x, x, other, x), "reference_chosen is a tensor .* expected shape"),
        (lambda: dpo(x, x[:1], x, x[:1]), "rejected is a tensor .* expected 2 sequences"),
        (lambda: dpo(x[0], x, x[0], x), "chosen is a tensor .* two dimensions"),
        (lambda: dpo(x, x, x, x, label_smoothing=0.5), "label_smoothing is 0.5"),
        (lambda: orpo(x, x, mask, mask[:1]), "rejected_mask is a tensor"),
        (lambda: kto(x, x, mask), "desirable is a tensor .* one for each answer"),
        (lambda: grpo(x, x, torch.zeros(3), mask), "advantage is a tensor"),
        (lambda: grpo(x, x, torch.zeros(2), mask, per="row"), "per is 'row'"),
        (lambda: jsd(hidden, weight, hidden, weight[1:]), "teacher_weight is a tensor .* as many classes"),
        (lambda: jsd(hidden, weight, hidden[1:], weight), "teacher_input is a tensor"),
        (lambda: jsd(hidden, weight.double(), hidden, weight), "student_weight is torch.float64"),
        (lambda: jsd(hidden, weight, hidden, weight, mask), "mask is a tensor"),
        (lambda: jsd(hidden, weight, hidden, weight, beta=2), "beta is 2"),
        (lambda: jsd(hidden, weight, hidden, weight, temperature=0), "temperature is 0"),
    ]
    for call, words in calls:
        with pytest.raises(cupyops.InputError, match=words):
            call()


def test_orpo_of_a_certain_answer():
    """At probability 1 the log of the odds is infinite; the loss and its gradient are not."""
    mask = torch.ones(2, 2, dtype=torch.bool)
    chosen = torch.tensor([[0.0, 0.0], [-1e-9, -1e-9]]).requires_grad_()
    rejected = torch.full((2, 2), -1.0).requires_grad_()
    loss = orpo(chosen, rejected, mask, mask, beta=1.0)
    loss.backward()
    odds = torch.exp(torch.tensor(-1.0)) / (1 - torch.exp(torch.tensor(-1.0)))
    torch.testing.assert_close(loss.detach(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(chosen.grad, (-(1 + odds) / 4).expand(2, 2))
    torch.testing.assert_close(rejected.grad, torch.zeros(2, 2), atol=1e-6, rtol=0)


def test_answers_of_no_token_add_nothing():
    drawn = torch.Generator().manual_seed(0)
    policy = -torch.rand(3, 4, generator=drawn, dtype=torch.float64)
    old, advantage = (
        policy - 0.1 * torch.rand(3, 4, generator=drawn, dtype=torch.float64),
        torch.tensor([0.5, -1.0, 2.0]),
    )
    mask = torch.tensor([[True, True, False, True], [False] * 4, [True] * 4])
    for per, share in (("sequence", 2 / 3), ("token", 1.0)):
        some, all_ = (x.clone().requires_grad_() for x in (policy[[0, 2]], policy))
        expected = share * grpo(some, old[[0, 2]], advantage[[0, 2]], mask[[0, 2]], per=per)
        found = grpo(all_, old, advantage, mask, per=per)
        none = torch.zeros_like(mask)
        (nothing,) = torch.autograd.grad(zero := grpo(all_, old, advantage, none, per=per), all_)
        assert zero == 0 and not nothing.any()
        found.backward()
        expected.backward()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(all_.grad[[0, 2]], some.grad)
        assert not all_.grad[1].any()
    x = torch.randn(3, 4, requires_grad=True)
    loss = jsd(x, torch.randn(5, 4), torch.randn(3, 4), torch.randn(5, 4), torch.zeros(3, dtype=torch.bool))
    loss.backward()
    assert loss == 0 and not x.grad.any()
    some = policy.clone().requires_grad_()
    full = torch.ones_like(mask)
    orpo(some, old, mask, full).backward()
    fewer = policy[[0, 2]].clone().requires_grad_()
    orpo(fewer, old[[0, 2]], mask[[0, 2]], full[[0, 2]]).backward()
    torch.testing.assert_close(some.grad[[0, 2]], fewer.grad)
    assert not some.grad[1].any()


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("apart", [100.0, 0.15, 0.0, -0.15, -100.0])
def test_grpo_of_any_ratio(advantage, apart):
    """What is clipped has no gradient, however far the ratio is."""
    if advantage < 0 and apart == 100.0:  # is not clipped, and is infinite
        return
    policy = torch.zeros(1, 1, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss = grpo(policy, policy.detach() - apart, torch.tensor([advantage]), mask, epsilon=0.1)
    loss.backward()
    ratio = min(float(torch.tensor(apart).exp()), 1e30)
    clipped = min(max(ratio, 0.9), 1.1)
    chosen = min(ratio * advantage, clipped * advantage)
    moves = ratio * advantage == chosen and advantage != 0
    torch.testing.assert_close(loss.item(), -chosen)
    torch.testing.assert_close(policy.grad.item(), -ratio * advantage if moves else 0.0, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_masks_of_integers(answers, dtype):
    weight, ((x, target), (z, other)) = answers
    chosen, rejected = linear_log_prob(x, weight, target), linear_log_prob(z, weight, other)
    one, two = target != -100, other != -100
    advantage = torch.ones(PAIRS, device=x.device, dtype=x.dtype)
    good = torch.tensor([True, False, True], device=x.device)
    for call, masks in (
        (lambda a, b: orpo(chosen, rejected, a, b), (one, two)),
        (lambda a: grpo(chosen, chosen.detach() - 0.1, advantage, a), (one,)),
        (lambda a: jsd(x, weight, z, weight, a), (one,)),
        (lambda a: kto(chosen, rejected, a), (good,)),
    ):
        torch.testing.assert_close(call(*(mask.to(dtype) for mask in masks)), call(*masks))
        with pytest.raises(cupyops.errors.InputError, match=r"(mask|desirable) is .*float32.*`mask != 0`"):
            call(*(mask.float() for mask in masks))
