"""Each example is run as a user runs it: few epochs on a CPU; on a GPU with a look at what ran."""

import functools
import gzip
import importlib.util
import os
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import run_python, torchrun
from typer.testing import CliRunner

import cupyops

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = [
    "add_model", "mnist_cnn", "custom_layers", "custom_operator", "novel_attention", "train_gpt", "train_llama",
    "finetune_lora", "train_resnet", "compile_model",
]  # fmt: skip


@functools.cache
def load(name):
    """The example as a module; loaded once, since an operator's name can be registered once."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # where examples find what they share
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, *arguments, code=0):
    """What the program prints; lines that the terminal's width broke are joined."""
    result = CliRunner().invoke(load(name).app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def number(pattern, text):
    """The number that the group of `pattern` matches."""
    found = re.search(pattern, text)
    assert found, f"{pattern!r} is not in:\n{text}"
    return float(found.group(1))


@pytest.mark.parametrize("name", NAMES)
def test_import_has_no_side_effects(name, capfd):
    module = load(name)
    assert callable(module.main)
    assert capfd.readouterr() == ("", "")


def test_compile_model():
    torch._dynamo.reset()
    text = run("compile_model", "--steps", 12, "--width", 4, "--simulate", "--explain")
    assert number(r"loss [\d.]+, then ([\d.]+);", text) < number(r"loss ([\d.]+),", text)
    assert number(r"losses within ([\d.e+-]+) of", text) < 1e-4
    assert number(r"(\d+) launches in the simulator", text) > 10
    assert "forward graph of" in text and "not fused: aten.convolution.default" in text


@pytest.mark.parametrize("name", NAMES)
def test_help(name):
    for option in ("--device", "--seed", "--trace"):
        assert option in re.sub(r"\x1b\[[0-9;]*m", "", run(name, "--help"))


@pytest.mark.parametrize("way", ["inline", "file"])
def test_add_model(way):
    output = run("add_model", "--kernel", way, "--device", "cpu", "--epochs", 60, "--size", 50, "--trace")
    losses = [float(value) for value in re.findall(r"epoch +\d+ +loss (\S+)", output)]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True), output
    assert output.count("origin") == 2 and "vector_add_bwd<float>" in output
    assert f"add_model::add_{way}" in output and "tensors on cpu" in output


def test_add_model_from_cubins(tmp_path):
    """In a process of its own, where nothing has been compiled or cached."""
    folder = tmp_path / "cubins"
    command = [EXAMPLES / "add_model.py", "--kernel", "wheel", "--epochs", 2, "--cubins", folder]
    environment = os.environ | {"CUPYOPS_CACHE_DIR": str(tmp_path / "cache"), "COLUMNS": "200"}
    done = run_python(*command, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("origin precompiled") == 2, done.stdout
    assert len(list(folder.glob("*.cubin"))) == 8, "two kernels, as text and as a file, for two dtypes"
    assert not list((tmp_path / "cache").rglob("*.cubin")), "the cache was not needed"


def test_add_model_in_the_simulator():
    output = run("add_model", "--device", "cpu", "--epochs", 1, "--size", 300, "--simulate", 2)
    assert "2 steps in the simulator end as by the reference" in output
    assert "vector_add_bwd<float>, vector_add_fwd<float>" in output


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_add_operator_beyond_its_kernel(device, dtype):
    """Shapes that the kernel has no case for are added by the reference."""
    module = load("add_model")
    add = module.add_operator(module.Way.inline)
    a, b = torch.randn(3, 4, device=device, dtype=dtype), torch.randn(4, device=device, dtype=dtype)
    torch.testing.assert_close(add(a, b), a + b)
    torch.testing.assert_close(add(a.t(), a.t()), 2 * a.t())


def test_ladder(monkeypatch, capsys):
    """Each kernel gives what PyTorch does; one that gives something else is named."""
    module = load("ladder")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module.main()
    assert capsys.readouterr().out.count("right\n") == 23
    with pytest.raises(AssertionError, match="a kernel: "):
        module.compare(("a kernel", lambda: torch.ones(3), torch.tensor([1.0, 1.0, 1.5])))


def test_mnist_on_bundled_digits(tmp_path):
    picture = tmp_path / "new" / "loss.png"
    output = run(
        "mnist_cnn", "--device", "cpu", "--epochs", 1, "--batch-size", 128, "--compare", "--trace", "--plot", picture
    )
    assert "1438 to train, 359 to test" in output
    assert number(r"test accuracy: (\S+)%", output) > 20
    assert number(r"at any step: (\S+)", " ".join(output.split())) == 0, "on a CPU both are PyTorch"
    assert all(
        f"cupyops::{op}" in output for op in ("conv2d", "relu", "max_pool2d", "linear", "log_softmax", "nll_loss")
    )
    content = picture.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) > 10_000


def test_mnist_in_the_simulator(monkeypatch):
    """A step of each of the two networks; a kernel that computes something else is noticed."""
    module = load("mnist_cnn")
    digits = module.bundled_digits(0).ready(torch.device("cpu"))
    monkeypatch.setattr(module, "FEW", 2)
    with module.console.capture() as said:
        module.simulate(digits, 1, lr=0.1, momentum=0.9)
    assert "1 steps of 2 images" in said.get() and "conv2d_direct_bwd_weight<float" in said.get()
    monkeypatch.setattr(cupyops.optim, "SGD", lambda *args, lr, **rest: torch.optim.SGD(*args, lr=2 * lr, **rest))
    with pytest.raises(AssertionError, match="not close"):
        module.simulate(digits, 1, lr=0.1, momentum=0.9)


def write_idx(path, values):
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    content = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder, stems, suffix=""):
    generator = np.random.default_rng(0)
    for stem, count in stems.items():
        write_idx(folder / f"{stem}-images-idx3-ubyte{suffix}", generator.integers(0, 256, (count, 28, 28)))
        write_idx(folder / f"{stem}-labels-idx1-ubyte{suffix}", np.arange(count) % 10)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_files(tmp_path, suffix):
    write_mnist(tmp_path, {"train": 40, "t10k": 20}, suffix)
    digits = load("mnist_cnn").idx_digits(tmp_path, seed=0)
    assert digits.train_images.shape == (40, 1, 28, 28) and digits.test_images.shape == (20, 1, 28, 28)
    assert digits.train_labels.tolist() == [i % 10 for i in range(40)]
    assert digits.train_images.dtype == torch.float32 and 0.9 < digits.train_images.max() <= 1


def test_mnist_test_files_only(tmp_path):
    write_mnist(tmp_path, {"t10k": 50}, ".gz")
    output = run("mnist_cnn", "--data", tmp_path, "--device", "cpu", "--epochs", 1, "--plot", tmp_path / "loss.png")
    assert "45 to train, 5 to test" in " ".join(output.split())
    first, second = (load("mnist_cnn").idx_digits(tmp_path, seed=seed) for seed in (0, 0))
    assert torch.equal(first.test_images, second.test_images), "the split depends on the seed alone"


def spoil(name, change):
    def spoiler(folder):
        path = folder / name
        content = change(path.read_bytes())
        path.unlink() if content is None else path.write_bytes(content)

    return spoiler


@pytest.mark.parametrize(
    ("spoiler", "words"),
    [
        (lambda folder: [path.unlink() for path in folder.iterdir()], "Looked for"),
        (spoil("t10k-labels-idx1-ubyte", lambda content: None), "no t10k-labels-idx1-ubyte"),
        (spoil("t10k-labels-idx1-ubyte", lambda content: b"GIF8" + content[4:]), "begins with 47494638"),
        (spoil("t10k-images-idx3-ubyte", lambda content: content[:-5]), "header says"),
        (lambda folder: write_idx(folder / "t10k-labels-idx1-ubyte", np.zeros(3)), "expected as many of both"),
        (lambda folder: write_idx(folder / "t10k-images-idx3-ubyte", np.zeros((20, 8, 8))), "of 28x28"),
        (lambda folder: (folder / "t10k-images-idx3-ubyte").write_bytes(b""), "begins with"),
    ],
    ids=["none", "no labels", "not IDX", "cut short", "other number", "other size", "empty"],
)
def test_mnist_files_that_are_wrong(tmp_path, spoiler, words):
    write_mnist(tmp_path, {"t10k": 20})
    spoiler(tmp_path)
    with pytest.raises(load("mnist_cnn").typer.BadParameter, match=words):
        load("mnist_cnn").idx_digits(tmp_path, seed=0)
    run("mnist_cnn", "--data", tmp_path, code=2)


def test_mnist_gzip_cut_short(tmp_path):
    write_mnist(tmp_path, {"t10k": 20}, ".gz")
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(load("mnist_cnn").typer.BadParameter, match="cannot be read"):
        load("mnist_cnn").idx_digits(tmp_path, seed=0)


def test_mnist_two_sources_are_refused(tmp_path):
    assert "two sources" in " ".join(run("mnist_cnn", "--data", tmp_path, "--openml", code=2).split())


def test_custom_layers():
    output = run("custom_layers", "--device", "cpu", "--steps", 20, "--width", 16, "--trace")
    assert "cupyops::linear" in output and "cupyops::scale_shift" in output
    assert number(r"at any step (\S+)", " ".join(output.split())) < 1e-6


def test_custom_operator():
    output = run("custom_operator", "--device", "cpu", "--steps", 60, "--trace")
    assert "custom_operator::swish" in output
    assert number(r"beta learnt: (\S+),", output) == pytest.approx(2, abs=0.05)


def test_custom_operator_against_pytorch(device):
    swish = load("custom_operator").swish
    beta = torch.tensor(1.0, device=device)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.randn(1031, device=device, dtype=dtype)
        torch.testing.assert_close(swish(x, beta.to(dtype)), torch.nn.functional.silu(x))


def test_novel_attention(verse, device):
    """What knows positions learns the text, of which the other sees the letters alone."""
    sizes = ["--context", 32, "--dim", 32, "--batch-size", 8, "--steps", 60]
    output = run("novel_attention", "--data", verse, "--device", device, *sizes, "--trace")
    plain, rhythm = (number(rf"{name}: held loss (\S+),", output) for name in ("without", "with a rhythm"))
    assert rhythm < 0.8 * plain < 0.8 * np.log(30)
    assert output.count("waves of") == 2 and "cupyops::attention" in output
    run("novel_attention", "--dim", 33, code=2)


SIZES = {"batch-size": 4, "context": 16, "layers": 2, "dim": 32, "heads": 4, "kv-heads": 2}
SMALL = [*(word for name, size in SIZES.items() for word in (f"--{name}", str(size))), "--sample", "20"]


@pytest.fixture
def verse(tmp_path):
    """A text that a network learns at once."""
    path = tmp_path / "verse.txt"
    path.write_text("the quick brown fox jumps over the lazy dog;\n" * 60)
    return path


def test_train_gpt(verse, tmp_path):
    picture = tmp_path / "loss.png"
    given = ["--data", verse, "--device", "cpu", "--plot", picture, *SMALL]
    output = run("train_gpt", *given, "--steps", 40, "--lr", 0.02, "--compare", "--trace")
    assert number(r"at any step: (\S+)", " ".join(output.split())) == 0  # both are PyTorch
    assert number(r"last loss: (\S+),", output) < 2.5 < np.log(30)
    assert "cupyops::scaled_dot_product_attention" in output and picture.stat().st_size > 10_000


def test_train_gpt_by_kernels_in_the_simulator(verse, tmp_path):
    gpt = load("train_gpt")
    text = gpt.read(verse, 8)
    gpt.simulate(gpt.Config(len(text.alphabet), 1, 2, 1, 16, 8), text, 1, 1e-3, 0)


def test_train_gpt_goes_on(verse, tmp_path):
    """As if it had not been stopped, bit by bit."""
    gpt = load("train_gpt")
    loop, text = sys.modules["language"], gpt.read(verse, 16)
    config, devices = gpt.Config(len(text.alphabet), 1, 2, 1, 16, 16), gpt.Devices(torch.device("cpu"))
    whole, part, rest = (gpt.trainer(config, cupyops, devices, 1e-2, 8, seed) for seed in (0, 0, 1))
    loop.train([whole], text, 8, 2, 100, None)
    loop.train([part], text, 5, 2, 5, tmp_path / "kept.pt")
    loop.load(tmp_path / "kept.pt", rest, text)
    loop.train([rest], text, 8, 2, 100, None)
    assert rest.values() == whole.values() and len(whole.losses) == 8


def test_train_gpt_on_two_devices(verse, tmp_path):
    """The losses of one."""
    given = ["--data", verse, "--device", "cpu", "--plot", tmp_path / "loss.png", *SMALL, "--steps", 5]
    alone = number(r"last loss: (\S+),", run("train_gpt", *given))
    output = "".join(torchrun(2, EXAMPLES / "train_gpt.py", *given, env=os.environ))
    assert "on 2 x cpu" in output
    assert number(r"last loss: (\S+),", output) == pytest.approx(alone, abs=2e-4)


def test_train_gpt_refuses(verse, tmp_path):
    few = tmp_path / "few.txt"
    few.write_text("few")
    given = ["--device", "cpu", "--plot", tmp_path / "loss.png", *SMALL, "--steps", 1]
    for arguments, said in (
        (["--data", few], "has 3 characters, expected 170 or more"),
        (["--data", tmp_path / "none.txt"], "cannot be read as text"),
        (["--data", verse, "--heads", "3"], "is no multiple"),
    ):
        assert said in " ".join(run("train_gpt", *given, *arguments, code=2).replace("│", " ").split())
    run("train_gpt", "--data", verse, *given, "--checkpoint", tmp_path / "kept.pt")
    other = run("train_gpt", "--data", verse, *given, "--checkpoint", tmp_path / "kept.pt", "--layers", "1", code=2)
    assert "of another network or text" in " ".join(other.replace("│", " ").split())


def test_train_llama(verse, tmp_path):
    """One line changes who computes, and not what; on a CPU not a bit."""
    pytest.importorskip("transformers")
    given = ["--data", verse, "--device", "cpu", "--plot", tmp_path / "loss.png", "--batch-size", 2, "--context", 16]
    output = run("train_llama", *given, "--steps", 12, "--compare", "--checkpoint", tmp_path / "kept.pt", "--sample", 5)
    assert number(r"at any step: (\S+)", " ".join(output.split())) < 1e-5
    assert number(r"cupyops.swap: (\S+) replaced", output) > 20
    assert "12/12" in run("train_llama", *given, "--steps", 12, "--checkpoint", tmp_path / "kept.pt", "--sample", 0)


def test_train_llama_of_a_config(verse, tmp_path):
    llama = load("train_llama")
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "unknown": 3}'
    )
    assert llama.sizes_of(tmp_path / "config.json") == {"hidden_size": 64, "num_hidden_layers": 1}
    (tmp_path / "other.json").write_text('{"model_type": "gpt2"}')
    for name, said in (("other.json", "is of no Llama"), ("none.json", "cannot be read")):
        given = ["--data", verse, "--device", "cpu", "--config", tmp_path / name]
        assert said in " ".join(run("train_llama", *given, code=2).replace("│", " ").split())


LORA = ["--base-steps", 6, "--batch-size", 2, "--context", 16, "--rank", 2, "--evaluate-every", 6]


@pytest.fixture
def lora(verse, tmp_path):
    """Arguments of a short run."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    pictures = ["--plot", tmp_path / "loss.png", "--base", tmp_path / "base.pt", "--checkpoint", tmp_path / "lora.pt"]
    return ["--data", verse, "--device", "cpu", *LORA, *pictures]


def test_finetune_lora(lora, tmp_path):
    """The adapters learn, and are all that learns and that is kept; who computes is changed, and not what."""
    output = run("finetune_lora", *lora, "--steps", 12, "--lr", 0.01, "--compare", "--adapters", tmp_path / "adapters")
    flat = " ".join(output.split())
    assert number(r"at any step: (\S+)", flat) < 1e-5
    assert number(r"held: (\S+) of the base", flat) > number(r"of the base, (\S+) with adapters", flat) + 0.1
    assert number(r"cupyops.swap: (\S+) replaced", output) > 20
    kept = torch.load(tmp_path / "lora.pt", weights_only=True)["model"]
    assert kept and all("lora_" in name for name in kept)
    assert (tmp_path / "adapters" / "adapter_model.safetensors").stat().st_size < 200_000


def test_finetune_lora_goes_on(lora, tmp_path):
    """As if it had not been stopped, from the base that was kept."""
    whole = run("finetune_lora", *lora, "--steps", 12, "--sample", 0)
    assert "the base reads" in whole
    again = run("finetune_lora", *lora, "--steps", 12, "--sample", 10)
    assert "the base reads" not in again and "12/12" in again
    assert number(r"last loss: (\S+),", again) == number(r"last loss: (\S+),", whole)
    other = run("finetune_lora", *lora, "--steps", 12, "--rank", 3, code=2)
    assert "of another network or text" in " ".join(other.replace("│", " ").split())


RESNET = ["--batch-size", 16, "--width", 8, "--blocks", 1, "--size", 16, "--lr", 0.1, "--evaluate-every", 6]


def test_train_resnet(tmp_path):
    """It learns; and one line changes who computes, and not what: on a CPU not a bit."""
    picture = tmp_path / "loss.png"
    given = ["--device", "cpu", *RESNET, "--plot", picture, "--steps", 40, "--compare", "--trace"]
    output = " ".join(run("train_resnet", *given).split())
    assert "1437 to train, 360 held, of 10 classes" in output
    assert "torch.nn.BatchNorm2d now cupyops.nn.BatchNorm2d" in output
    assert number(r"at any step: (\S+)", output) == 0 and number(r"accuracy: (\S+)%", output) > 30
    assert "cupyops::conv2d" in output and picture.stat().st_size > 10_000


def test_train_resnet_goes_on(tmp_path):
    """As if it had not been stopped, bit by bit."""
    resnet, cpu = load("train_resnet"), torch.device("cpu")
    images, sizes = resnet.digits(8, cpu), {"classes": 10, "width": 4, "blocks": 1}
    whole, part, rest = (resnet.Trainer(sizes, cpu, 0.1, 8, seed, True, True) for seed in (0, 0, 1))
    resnet.train([whole], images, 8, 4, 100, None, False)
    resnet.train([part], images, 5, 4, 5, tmp_path / "kept.pt", False)
    resnet.load(tmp_path / "kept.pt", rest)
    resnet.train([rest], images, 8, 4, 100, None, False)
    assert rest.values() == whole.values() and len(whole.losses) == 8
    assert all(map(torch.equal, rest.network.state_dict().values(), whole.network.state_dict().values()))
    other = ["--checkpoint", tmp_path / "kept.pt", "--plot", tmp_path / "loss.png", "--device", "cpu", *RESNET]
    assert "of another network" in " ".join(run("train_resnet", *other, code=2).replace("│", " ").split())


def test_train_resnet_on_folders(tmp_path):
    from PIL import Image

    generator = np.random.default_rng(0)
    for name, low in (("dark", 0), ("light", 128)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for index in range(8):
            pixels = generator.integers(low, low + 128, (9 + index, 12, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{index}.png")
    given = ["--data", tmp_path / "images", "--device", "cpu", *RESNET, "--steps", 20, "--plot", tmp_path / "loss.png"]
    output = run("train_resnet", *given)
    assert "12 to train, 4 held, of 2 classes" in output and number(r"accuracy: (\S+)%", output) == 100
    (tmp_path / "images" / "light" / "a.png").write_text("no image")
    assert "isnoimage" in "".join(run("train_resnet", *given, code=2).replace("│", " ").split())
    (tmp_path / "none").mkdir()
    output = run("train_resnet", "--data", tmp_path / "none", "--device", "cpu", code=2)
    assert "has 0 images of 0 classes" in " ".join(output.replace("│", " ").split())


@pytest.mark.gpu
def test_train_resnet_by_kernels(tmp_path):
    """As a graph, beside PyTorch in bfloat16: at first the losses differ by its rounding; and it learns the digits."""
    given = ["--device", "cuda", "--plot", tmp_path / "loss.png"]
    output = run("train_resnet", *given, "--steps", 8, "--lr", 0.005, "--compare")
    assert number(r"at any step: (\S+)", " ".join(output.split())) < 0.15
    assert number(r"accuracy: (\S+)%", run("train_resnet", *given, "--steps", 200)) > 95


@pytest.mark.gpu
def test_finetune_lora_by_kernels(lora):
    given = ["cuda" if word == "cpu" else word for word in lora]
    output = " ".join(run("finetune_lora", *given, "--steps", 12, "--lr", 0.003, "--compare").split())
    assert number(r"at any step: (\S+)", output) < 0.2
    assert number(r"held: (\S+) of the base", output) > number(r"of the base, (\S+) with adapters", output)


@pytest.mark.gpu
def test_train_gpt_by_kernels(verse, tmp_path):
    """Beside PyTorch in bfloat16: the losses differ by its rounding."""
    given = ["--data", verse, "--device", "cuda", "--plot", tmp_path / "loss.png", *SMALL]
    output = run("train_gpt", *given, "--steps", 20, "--compare")
    assert number(r"at any step: (\S+)", " ".join(output.split())) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["inline", "file", "wheel"])
def test_add_model_by_kernels(way, monkeypatch):
    monkeypatch.setenv("CUPYOPS_CUBIN_PATH", "")
    with cupyops.trace() as trace:
        output = run("add_model", "--kernel", way, "--device", "cuda", "--size", 100)
    assert number(r"loss after 500 epochs: (\S+)", output) < 1e-5
    assert trace.routes() == {"kernel"}, str(trace)[:2000]
    assert {"vector_add_fwd<float>", "vector_add_bwd<float>"} <= {record.kernel for record in trace.launches()}


@pytest.mark.gpu
def test_mnist_by_kernels(tmp_path):
    with cupyops.trace() as trace:
        output = run("mnist_cnn", "--device", "cuda", "--epochs", 1, "--compare", "--plot", tmp_path / "loss.png")
    assert trace.routes() == {"kernel"}, str(trace)[:2000]
    assert number(r"at any step: (\S+)", " ".join(output.split())) < 0.05


@pytest.mark.gpu
def test_mnist_learns(tmp_path):
    """The defaults reach 97% on the digits that come with scikit-learn."""
    assert number(r"test accuracy: (\S+)%", run("mnist_cnn", "--device", "cuda", "--plot", tmp_path / "loss.png")) >= 97


@pytest.mark.gpu
def test_custom_layers_by_kernels():
    with cupyops.trace() as trace:
        output = run("custom_layers", "--device", "cuda", "--steps", 20)
    assert trace.routes() == {"kernel"}, str(trace)[:2000]
    assert number(r"at any step (\S+)", " ".join(output.split())) < 1e-3


@pytest.mark.gpu
def test_custom_operator_by_kernels():
    run("custom_operator", "--device", "cuda", "--steps", 5)  # gradcheck of the kernels among it
    with cupyops.trace() as trace:
        beta = load("custom_operator").learn_beta("cuda", 60, trace=False)
    assert trace.routes() == {"kernel"}, str(trace)[:2000]
    assert beta == pytest.approx(2, abs=0.05)
