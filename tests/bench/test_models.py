"""`python -m cupyops bench --models`: the figures that are kept and shown, and the tiny models."""

import dataclasses
import io

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import cupyops
from cupyops.bench import model_table, training
from cupyops.bench.model_table import Figures
from cupyops.cli.app import app
from cupyops.errors import InputError

MODELS = training.models()


def figures(model, variant, ms, losses=(2.5, 2.25)):
    return Figures(model, "a model, of a size", variant, ms, ms - 1, ms + 1, 2048, "tokens", 1.5, 3.0, list(losses))


SOME = [
    figures("gpt2", "eager", 50.0),
    figures("gpt2", "swap", 40.0, (2.5, 2.3)),
    figures("vit", "eager", 20.0),
    figures("vit", "graph", 25.0),
]


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["bench", "--models", *map(str, arguments)], env={"COLUMNS": "140"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_what_is_kept_is_read(tmp_path):
    model_table.write(SOME, {"gpu": "A card: the first"}, tmp_path / "x.csv")
    assert model_table.read(tmp_path / "x.csv") == (SOME, {"gpu": "A card: the first"})
    for content in ("", "model,about\n", f"{model_table.HEAD}\nmodel,ms\ngpt2,many\n"):
        (tmp_path / "y.csv").write_text(content)
        with pytest.raises(InputError, match="holds no figures of models"):
            model_table.read(tmp_path / "y.csv")


def test_kept_figures_are_shown(tmp_path):
    """Without a GPU; who is slower than PyTorch is told, and is the exit code."""
    model_table.write(SOME, {}, tmp_path / "x.csv")
    said = run("--from", tmp_path / "x.csv", "--png", tmp_path / "plots", code=1)
    assert "vit graph is slower than eager: 0.80" in said and "gpt2 swap" not in said
    line = next(line for line in said.splitlines() if "swap" in line)
    assert "1.25x" in line and "51,200 tokens" in line and "5.0e-02" in line
    for name in ("models", "losses"):
        assert (tmp_path / "plots" / f"{name}.png").stat().st_size > 5_000
    model_table.write(SOME[:3], {}, tmp_path / "x.csv")
    run("--from", tmp_path / "x.csv")


def test_a_loss_that_is_lost_is_told(tmp_path):
    model_table.write([SOME[0], figures("gpt2", "swap", 40.0, (2.5, float("nan")))], {}, tmp_path / "x.csv")
    assert "the loss is not finite" in run("--from", tmp_path / "x.csv", code=1)


def test_the_tiny_twin():
    assert "2 variants of tiny models compared, 0 wrong" in run("gpt2", "--dry-run")


def test_a_wrong_twin_is_told(monkeypatch):
    right = MODELS["gpt2"].loss

    def shifted(model, batch):
        return right(model, batch) + (type(model.head) is not torch.nn.Linear)

    monkeypatch.setitem(MODELS, "gpt2", dataclasses.replace(MODELS["gpt2"], loss=shifted))
    assert "gpt2 swap: losses" in run("gpt2", "--dry-run", "--against", "eager", code=1)


def test_every_model_says_what_it_is():
    for name, model in MODELS.items():
        assert model.name == name and model.each > 0 and model.half in ("pure", "autocast") and len(model.about) > 20
        assert training.why_not(model, "graph", "cpu") is not None


def test_what_cannot_be_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "there is no model 'gpt3'; there are llama" in run("gpt3", code=2)
    assert "--dry-run compares tiny models" in " ".join(run("gpt2", code=2).split())
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: None)
    assert "left out, transformers is not installed" in run("llama", "--dry-run", code=1)


@pytest.mark.gpu
def test_measured():
    model = MODELS["gpt2"]
    state, batches = training.state_of(model, True), training.batches_of(model, "cuda", True)
    with training.alone():
        timed = [training.Timed(model, variant, state, batches, tiny=True) for variant in ("eager", "swap", "graph")]
        figures = training.measure(timed)
    for found in figures:
        assert 0 < found.low <= found.ms <= found.high and found.peak_gib > 0
        assert len(found.losses) == training.WARM + training.ROUNDS * training.STEPS


def test_variants_take_turns(monkeypatch):
    """A round of each, then one of each the other way round, and so on; what one variant cannot do leaves the others."""
    from cupyops.cli import models

    begun, rounds = [], []

    class Timed:
        def __init__(self, model, variant, state, batches):
            if variant == "compile":
                raise RuntimeError("out of memory\nand so on")
            begun.append(variant)
            self.variant = variant

        def round(self):
            rounds.append(self.variant)

        def figures(self):
            return self.variant

    monkeypatch.setattr(training, "Timed", Timed)
    monkeypatch.setattr(training, "why_not", lambda model, variant, device: "why" if variant == "liger" else None)
    monkeypatch.setattr(training, "state_of", lambda model, tiny: {})
    monkeypatch.setattr(training, "batches_of", lambda model, device, tiny: [()])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    console = Console(record=True, width=200, file=io.StringIO())
    found = models._variants(MODELS["gpt2"], training.VARIANTS, lambda at, what: None, console)
    assert found == begun == ["eager", *training.OURS]
    assert rounds == [one for turn in range(training.ROUNDS) for one in (begun[::-1] if turn % 2 else begun)]
    said = console.export_text()
    assert "gpt2 compile: RuntimeError: out of memory\n" in said and "gpt2 liger: left out, why" in said

    monkeypatch.setattr(training, "why_not", lambda model, variant, device: None)
    rounds.clear()
    found = models._variants(MODELS["gpt2"], training.VARIANTS, lambda at, what: None, console)
    assert found == ["eager", *training.OURS, "liger"] and rounds[-training.ROUNDS :] == ["liger"] * training.ROUNDS


def test_swap_reads_the_models_of_the_benchmark():
    """As those of anybody: they lie in the package, and are none of its modules."""
    swapped = cupyops.swap(MODELS["gpt2"].make(True))
    found = {one.type.__name__: one.what for one in swapped.replaced}
    assert found["_GPT2"] == "cross_entropy in its forward"
    assert "scaled_dot_product_attention" in found["_Block"]
