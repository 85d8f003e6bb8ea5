"""cupyops and Hugging Face's transformers: attention by name, losses, a Trainer's callback, adapters of peft."""

import copy
import pickle

import pytest
import torch

import cupyops
import cupyops.integrations.transformers as integration

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # of transformers, about its own configurations


def llama(implementation="sdpa", dtype=torch.float32, **more):
    torch.manual_seed(0)
    small = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, **small, **more)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)


def batch():
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def test_attention_by_name():
    expected = llama()(**batch())
    integration.register()
    model = llama("cupyops")
    with cupyops.trace() as trace:
        found = model(**batch())
    assert "cupyops::scaled_dot_product_attention" in {r.operator for r in trace.records}
    torch.testing.assert_close((found.loss, found.logits), (expected.loss, expected.logits))


@pytest.mark.parametrize("case", ["padding", "cache", "dropout", "one token", "packed"])
def test_attention_with(case):
    """What the kernels do not serve is transformers' own function, and what they do is the same."""
    model = llama(attention_dropout=0.3 if case == "dropout" else 0.0)
    given = batch()
    if case == "padding":
        given["attention_mask"] = torch.tensor([[1] * 7, [0, 0, 0, 1, 1, 1, 1]])
    elif case == "packed":
        given["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])
    elif case == "one token":
        given = {"input_ids": torch.tensor([[5]])}

    def logits():
        torch.manual_seed(2)
        if case == "cache":
            with torch.no_grad():
                return model.eval().generate(given["input_ids"], max_new_tokens=5, do_sample=False)
        return model(**given).logits

    model.train()
    expected = logits()
    with cupyops.swap(model):
        torch.testing.assert_close(logits(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(), expected)


def test_bfloat16_and_autocast():
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        model = llama(dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = model(**batch())
            cupyops.swap(model)
            found = model(**batch())
        assert found.logits.dtype is expected.logits.dtype
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-2, atol=0)


def test_a_step_in_the_simulator():
    """In bfloat16, which attention's kernels serve: nothing that was swapped takes the reference."""
    model = llama(dtype=torch.bfloat16)

    def step():
        model.zero_grad()
        loss = model(**batch()).loss
        loss.backward()
        return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = step()
    cupyops.swap(model)
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        found = step()
    assert trace.routes() == {"simulator"}
    assert "cupyops::scaled_dot_product_attention (backward)" in {record.operator for record in trace.records}
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0.03 * float(tensor.abs().max()), msg=name)


def test_items_in_the_batch():
    """As a Trainer gives them, so that gradients accumulated over batches are of the mean over tokens."""
    model, count = llama(), torch.tensor(24)
    expected = model(**batch(), num_items_in_batch=count).loss
    with cupyops.swap(model) as swap, cupyops.trace() as trace:
        torch.testing.assert_close(model(**batch(), num_items_in_batch=count).loss, expected)
    assert "cupyops::cross_entropy" in {r.operator for r in trace.records}
    assert swap.settings == (
        'attention: "sdpa", now "cupyops"',
        "loss: ForCausalLMLoss, now by cross_entropy of cupyops",
    )


@pytest.mark.parametrize("items", [None, 24])
def test_no_copy_of_the_logits_in_fp32(items):
    """Which transformers makes: the loss of half logits is fp32 all the same, by one operator."""
    model = llama(dtype=torch.bfloat16)
    given = batch() | ({} if items is None else {"num_items_in_batch": torch.tensor(items)})
    expected = model(**given).loss
    wanted = torch.autograd.grad(expected, model.lm_head.weight)[0]
    cupyops.swap(model)
    with cupyops.simulate(), cupyops.trace() as trace:
        found = model(**given).loss
        grad = torch.autograd.grad(found, model.lm_head.weight)[0]
    assert "cupyops::cross_entropy_fp32" in {r.operator for r in trace.records}
    assert not {"cupyops::cross_entropy"} & {r.operator for r in trace.records}
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)
    torch.testing.assert_close(grad, wanted, rtol=0, atol=0.03 * float(wanted.abs().max()))


def trained(model, given, autocast=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(**given)
    named = dict(model.named_parameters())
    loss = output[0] if isinstance(output, tuple) else output.loss
    return output, loss, dict(zip(named, torch.autograd.grad(loss, list(named.values()))))


NO_LOGITS = "logits: none when it trains; lm_head and the loss are one fused_linear_cross_entropy"


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": torch.tensor(24)}, {"return_dict": False}], ids=str)
def test_no_logits(more, autocast):
    """In training, as they are of no use there: the loss and the gradients of head and rows are those of the model."""
    given = batch() | more
    given["labels"] = given["labels"].masked_fill(given["labels"] == given["labels"][0, 2], -100)
    model = llama(dtype=torch.float32 if autocast else torch.bfloat16).train()
    _, loss, expected = trained(model, given, autocast)
    with cupyops.swap(model, keep_logits=False) as swap:
        assert swap.settings[-1] == NO_LOGITS
        with cupyops.simulate(), cupyops.trace() as trace:
            output, found, grads = trained(model, given, autocast)
        ran = {record.operator for record in trace.records}
        assert "cupyops::fused_linear_cross_entropy" in ran and not {"cupyops::cross_entropy_fp32"} & ran
        assert (output[1] if isinstance(output, tuple) else output.logits) is None
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, loss, rtol=1e-2, atol=0)
        for name, wanted in expected.items():
            torch.testing.assert_close(grads[name], wanted, rtol=0, atol=0.04 * float(wanted.abs().max()), msg=name)
    assert "forward" not in vars(model.lm_head) and not model._forward_hooks and not model._forward_pre_hooks
    assert torch.equal(trained(model, given, autocast)[1], loss)


def test_logits_where_they_are_asked_for():
    """Without labels, without gradients, in evaluation, of float32, and where a hook is to see the head."""
    model = llama(dtype=torch.bfloat16)
    cupyops.swap(model, keep_logits=False)
    assert model.train()(**batch()).logits is None
    with torch.no_grad():
        assert model(**batch()).logits.shape == (2, 7, 64)
    assert model(input_ids=batch()["input_ids"]).logits.shape == (2, 7, 64)
    with pytest.raises(TypeError, match="subscriptable"):
        model(**batch(), position_ids=object())
    assert model.eval()(**batch()).logits.shape == (2, 7, 64)
    seen = []
    handle = model.lm_head.register_forward_hook(lambda head, args, output: seen.append(output.shape))
    assert model.train()(**batch()).logits.shape == (2, 7, 64) and seen == [(2, 7, 64)]
    handle.remove()
    assert model(**batch()).logits is None
    assert torch.compile(model, backend="eager")(**batch()).logits.shape == (2, 7, 64)
    whole = llama().train()
    cupyops.swap(whole, keep_logits=False)
    assert whole(**batch()).logits.shape == (2, 7, 64)


def test_no_logits_of_copies():
    """A copy has its own head; a pickled one too."""
    model = llama(dtype=torch.bfloat16).train()
    cupyops.swap(model, keep_logits=False)
    loss = model(**batch()).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.lm_head.forward.args[0] is other.lm_head
        output = other(**batch())
        assert output.logits is None and torch.equal(output.loss, loss)


def test_logits_that_are_changed_on_their_way():
    """Of a model that caps them, and of one whose loss is its owner's."""
    with pytest.raises(cupyops.InputError, match="exact=True keeps the logits"):
        cupyops.swap(llama(), exact=True, keep_logits=False)
    model = llama()
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()
    kept = "logits: kept, since "
    assert cupyops.swap(model, keep_logits=False).settings[-1] == kept + "its loss_function is not one of transformers"
    nothing = (kept + "no model of transformers has a loss of its own",)
    assert cupyops.swap(torch.nn.Linear(2, 2), keep_logits=False).settings == nothing
    sizes = {
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }  # fmt: skip
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    settings = cupyops.swap(bert, keep_logits=False).settings
    assert settings[-1] == kept + "its forward computes the loss itself, without loss_function"
    settings = cupyops.swap(llama(), skip="lm_head", keep_logits=False).settings
    assert settings[-1] == kept + "lm_head stays as it is: skip names it"

    class Capped(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            hidden = self.model(input_ids=input_ids).last_hidden_state
            logits = self.lm_head(hidden)
            logits = torch.tanh(logits)
            loss = self.loss_function(logits, labels, self.config.vocab_size)
            return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    model = llama(dtype=torch.bfloat16).train()
    model.__class__ = Capped
    expected = model(**batch())
    swap = cupyops.swap(model, keep_logits=False)
    assert swap.settings[-1].startswith("logits: kept, since its forward does more")
    torch.testing.assert_close(model(**batch()).logits, expected.logits, rtol=2e-2, atol=2e-2)


def test_a_loss_of_the_user_stays():
    model = llama()
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()
    before = model.loss_function
    cupyops.swap(model).undo()
    assert model.loss_function is before


def test_eager_attention_stays_eager():
    model = llama("eager")
    swap = cupyops.swap(model)
    assert model.config._attn_implementation == "eager"
    assert 'attention: "eager", kept: only "sdpa" is the same function' in swap.settings


def test_copies_and_saved_models(tmp_path):
    model = llama()
    cupyops.swap(model)
    expected = model(**batch()).logits
    assert torch.equal(copy.deepcopy(model)(**batch()).logits, expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(**batch()).logits, expected)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(**batch()).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_is_unpickled_elsewhere():
    """In a process where nothing was swapped, and so nothing registered."""
    model = llama()
    cupyops.swap(model)
    expected, data = model(**batch()).logits, pickle.dumps(model)
    transformers.AttentionInterface._global_mapping.pop("cupyops")
    integration.register.cache_clear()
    assert torch.equal(pickle.loads(data)(**batch()).logits, expected)


def test_skip_names_a_class_of_transformers():
    model = llama()
    kind = type(model.model.norm)
    swap = cupyops.swap(model, skip=kind)
    assert "rms_norm" not in {one.what for one in swap.replaced}
    assert {one.reason for one in swap.kept if one.type is kind} == {"skip names it"}


def test_gradient_checkpointing():
    model = llama().train()
    model(**batch()).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    cupyops.swap(model)
    model.gradient_checkpointing_enable()
    model(**batch()).loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=1e-4, atol=1e-6)


def test_the_callback_of_a_trainer():
    model, made = llama(), integration.callback(skip=torch.nn.Linear)
    before = type(model.model.norm)
    made.on_train_begin(None, None, None, model=model)
    assert type(model.model.norm) is not before and type(model.lm_head) is torch.nn.Linear
    assert "rms_norm" in {one.what for one in made.swap.replaced}
    made.on_train_end(None, None, None)
    assert type(model.model.norm) is before and isinstance(made, transformers.TrainerCallback)


@pytest.mark.parametrize("first", ["adapters", "swap"])
def test_adapters(first):
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapted(model):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "gate_proj", "down_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, config)

    def step(model):
        model.zero_grad()
        model(**batch()).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = step(adapted(llama()))
    model = llama()
    if first == "adapters":
        model = adapted(model)
        cupyops.swap(model)
    else:
        cupyops.swap(model)
        model = adapted(model)
    found = step(model)
    assert found.keys() == expected.keys() and all("lora" in name for name in found)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-6)
    with cupyops.trace() as trace:
        model(**batch())
    assert {"cupyops::swiglu", "cupyops::rms_norm", "cupyops::linear"} <= {r.operator for r in trace.records}


@pytest.mark.parametrize("lengths", [(1, 7), (7, 7), (3, 7)], ids=str)
@pytest.mark.parametrize("local", [None, 4, 9])
@pytest.mark.parametrize(
    "skips",
    [(True, False), (False, True), (False, False)],
    ids=["causal", "both directions", "never"],
)
def test_masks_while_a_graph_is_captured(monkeypatch, lengths, local, skips):
    """None where there is none eagerly, in versions of transformers too that make one whenever they cannot look."""
    from transformers import masking_utils

    from cupyops.nn._swap import tables

    queries, keys = lengths
    given = dict(batch_size=2, q_length=queries, kv_length=keys, q_offset=keys - queries, local_size=local)
    given |= dict(zip(("allow_is_causal_skip", "allow_is_bidirectional_skip"), skips), attention_mask=None)
    eagerly = masking_utils.sdpa_mask(**given)
    monkeypatch.setattr(tables, "capturing", lambda: True)
    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        monkeypatch.setattr(masking_utils, name, lambda *_, **__: False)
    found = tables.mask(**given)
    assert (found is None) is (eagerly is None) and (found is None or torch.equal(found, eagerly))
    padded = tables.mask(**given | {"attention_mask": torch.ones(2, keys, dtype=torch.bool)})
    assert padded is not None
    position = given.pop("q_length"), given.pop("q_offset")
    assert tables._all_see(cache_position=torch.arange(position[0]) + position[1], **given) is (found is None)


def looks(monkeypatch):
    """How often transformers looks at positions for sequences that are packed, from here on."""
    from transformers import masking_utils

    seen, original = [], masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda p: seen.append(1) or original(p))
    return seen


def test_positions_that_the_model_counts_are_not_looked_at(monkeypatch):
    """A model knows its own positions: so the host waits for no GPU, and a graph that is captured holds no mask for them."""
    model, given, seen = llama(use_cache=False), batch(), looks(monkeypatch)
    model.eval()
    assert type(model.model).__name__ == "LlamaModel"
    length = given["input_ids"].shape[1]
    packed = torch.cat([torch.arange(3), torch.arange(length - 3)])[None]
    right = [model(**given).logits, model(**given, position_ids=packed).logits]
    assert len(seen) == 2
    swapped = cupyops.swap(model)
    assert type(model.model).__name__ == "LlamaModel" and "positions in its forward" in str(swapped)
    found = [model(**given).logits, model(**given, position_ids=packed).logits]
    assert len(seen) == 3  # at those that were given
    torch.testing.assert_close(found, right)
    assert (found[0] - found[1]).abs().max() > 0.01
    again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for one in again:
        torch.testing.assert_close(one(**given).logits, right[0])
    assert len(seen) == 3
    swapped.undo()
    model(**given)
    assert len(seen) == 4


def by_lengths(self, inputs_embeds, position_ids=None):
    if position_ids is None:
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
        position_ids = position_ids.unsqueeze(0)
    return position_ids


def by_cache_position(self, inputs_embeds, position_ids=None, cache_position=None):
    past_seen_tokens = 3
    if cache_position is None:
        cache_position: torch.Tensor = torch.arange(
            past_seen_tokens, past_seen_tokens + inputs_embeds.shape[1], device=inputs_embeds.device
        )
    if position_ids is None:
        position_ids = cache_position.unsqueeze(0)
    return position_ids


def by_padding(self, inputs_embeds, attention_mask=None, position_ids=None):
    if position_ids is None:
        position_ids = attention_mask.long().cumsum(-1) - 1
    return position_ids


def of_others(self, inputs_embeds, other=None, position_ids=None):
    if position_ids is None:
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
    position_ids, other = other, position_ids
    return position_ids


def in_place(self, inputs_embeds, position_ids=None):
    if position_ids is None:
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
    position_ids += 1
    return position_ids


def never(self, inputs_embeds, position_ids=None):
    return position_ids


@pytest.mark.parametrize(
    "forward, counted",
    [
        (by_lengths, True), (by_cache_position, True), (by_padding, False), (of_others, False), (in_place, False),
        (never, False),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)  # fmt: skip
def test_which_positions_are_counted(forward, counted):
    from cupyops.nn._swap import positions

    assert positions.are_counted(forward) is counted
