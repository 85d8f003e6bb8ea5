"""The pictures of the README and of the site, each made from what it shows; they go into docs/assets.

    python tools/pictures.py plots      bars from the figures of benchmarks/results
    python tools/pictures.py terminal   a real session, as an animation: new, a compile error, a failing and a passing check
    python tools/pictures.py race       the page of `simulate --html` for a kernel with a race; needs Chromium

tests/test_pictures.py makes the first two again, and compares them with what is committed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import typer

from cupyops.bench import model_table
from cupyops.bench.table import read

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "docs" / "assets"
RESULTS = ROOT / "benchmarks" / "results"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

# --- plots ---

STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de; } text { font: 14px system-ui, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; font-size: 16px; } .note { fill: #59636e; font-size: 12px; } .value { font-size: 13px; }
  .ours { fill: #00897b; } .graph { fill: #00594f; }
  .peer { fill: #b7bec6; } .other { fill: #8250df; opacity: 0.55; } .one { stroke: #59636e; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d; } text { fill: #e6edf3; } .note { fill: #9198a1; }
    .ours { fill: #26a69a; } .graph { fill: #7fd6cc; }
    .peer { fill: #59636e; } .other { fill: #a371f7; } .one { stroke: #9198a1; }
  }"""
LONGEST = 8.0  # a longer bar is cut, and says so, since the others would be too short to compare
MODELS = {
    "llama": "Llama, 8 layers, bf16",
    "gpt2": "GPT-2 124M, autocast",
    "vit": "ViT-B/16, autocast",
    "resnet50": "ResNet-50, autocast",
    "bert": "BERT base, autocast",
    "convnext": "ConvNeXt-T, autocast",
    "unet": "UNet of diffusers, autocast",
    "whisper": "Whisper's encoder, autocast",
    "moe": "Qwen3-MoE, small, autocast",
}
WHOSE = {"swap": "ours", "graph": "graph", "compile": "other", "liger": "peer"}  # class of a bar, by variant
KERNELS = (
    "layer_norm 32768x4096 bfloat16",
    "rms_norm 32768x4096 bfloat16",
    "batch_norm 64x256x56x56 training bfloat16",
    "softmax 65536x4096 bfloat16",
    "cross_entropy 4096x128256 bfloat16",
    "swiglu 8192x14336 bfloat16",
    "gelu tanh 2^27 bfloat16",
    "max_pool2d 256x64x112x112 k2 float32",
    "embedding 16384 of 50257x768 bfloat16",
    "fused_linear_cross_entropy 8192x4096x128256 bfloat16",
    "linear 4096x4096x4096 bfloat16",
)


class Bar(NamedTuple):
    """One bar: whose it is, how long, and the words at its end."""

    who: str
    value: float
    words: str


def models() -> Iterator[tuple[str, list[Bar]]]:
    """Speed of a training step after `cupyops.swap`, and as a CUDA graph, PyTorch's being 1; beside others."""
    figures, _ = model_table.read(RESULTS / "h100_models.csv")
    for model, label in MODELS.items():
        ms = {one.variant: one.ms for one in figures if one.model == model}
        if "swap" not in ms:
            continue
        words = {"swap": f"   ({ms['eager']:.0f} ms before, {ms['swap']:.0f} ms after)"}
        ratios = {variant: ms["eager"] / ms[variant] for variant in WHOSE if variant in ms}
        yield label, [Bar(WHOSE[one], ratio, f"{ratio:.2f}{words.get(one, '')}") for one, ratio in ratios.items()]


def kernels() -> Iterator[tuple[str, list[Bar]]]:
    """Speed of forward and backward, PyTorch's in eager mode being 1, beside `torch.compile`."""
    rows = {row.name: row for row in read(RESULTS / "h200.csv").rows}
    for name in KERNELS:
        us = {who: sum(figure.us for figure in ways.values()) for who, ways in rows[name].figures.items()}
        ratios = {who: us["eager"] / us[who] for who in ("ours", "compile") if us.get(who)}
        bars = [Bar("ours", ratios["ours"], f"{ratios['ours']:.2f}")]
        if "compile" in ratios:
            bars.append(Bar("other", ratios["compile"], f"{ratios['compile']:.2f}"))
        yield name, bars


def plot(title: str, note: str, rows: list[tuple[str, list[Bar]]], legend: dict[str, str]) -> str:
    """Horizontal bars as SVG, with a line where PyTorch's eager mode is."""
    left, right, thick = 20 + 8.2 * max(len(label) for label, _ in rows), 900, 16
    scale = (right - left - 60) / max(1.0, *(min(bar.value, LONGEST) for _, bars in rows for bar in bars))
    if all(bar.value < 2 for _, bars in rows for bar in bars):
        longest = max(bar.value for _, bars in rows for bar in bars)
        scale = (right - left - 260) / max(1.2, longest)  # room for longer words
    top = y = 84
    parts = []
    for label, bars in rows:
        height = thick * len(bars)
        parts.append(f'<text x="{left - 10:.0f}" y="{y + height / 2 + 5:.0f}" text-anchor="end">{escape(label)}</text>')
        for bar in bars:
            width = min(bar.value, LONGEST) * scale
            parts.append(
                f'<rect class="{bar.who}" x="{left:.0f}" y="{y}" width="{width:.1f}" height="{thick - 3}" rx="2"/>'
            )
            words = escape(bar.words) + (", cut" if bar.value > LONGEST else "")
            parts.append(f'<text class="value" x="{left + width + 6:.1f}" y="{y + thick - 5}">{words}</text>')
            y += thick
        y += 10
    line = left + scale
    parts.append(f'<line class="one" x1="{line:.1f}" x2="{line:.1f}" y1="{top - 8}" y2="{y}" stroke-dasharray="4 3"/>')
    said = "PyTorch, eager mode = 1; longer is faster"
    parts.append(f'<text class="note" x="{line:.1f}" y="{y + 16}" text-anchor="middle">{said}</text>')
    keys, x = [], 20
    shown = {bar.who for _, bars in rows for bar in bars}
    for who, words in ((who, words) for who, words in legend.items() if who in shown):
        keys.append(f'<rect class="{who}" x="{x}" y="56" width="12" height="12" rx="2"/>')
        keys.append(f'<text class="value" x="{x + 18}" y="67">{escape(words)}</text>')
        x += 40 + 8 * len(words)
    height = y + 50
    head = f'<text class="title" x="20" y="34">{escape(title)}</text>'
    foot = f'<text class="note" x="20" y="{height - 14}">{escape(note)}</text>'
    body = "\n".join([head, *keys, *parts, foot])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" role="img" aria-label="{escape(title)}">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="card" x="0.5" y="0.5" width="959" height="{height - 1}" rx="8"/>\n{body}\n</svg>\n'
    )


def plots() -> dict[str, str]:
    """The two plots by the names of their files."""
    return {
        "models.svg": plot(
            "Whole models: a training step after cupyops.swap(model)",
            "NVIDIA H100, PyTorch 2.11; optimizer and clipping are swapped too; median of 7 times 4 steps; h100_models.csv",
            list(models()),
            {"ours": "cupyops.swap", "graph": "the same as a CUDA graph", "other": "torch.compile", "peer": "Liger"},
        ),
        "kernels.svg": plot(
            "Kernels: forward and backward together",
            "NVIDIA H200, PyTorch 2.11; cold caches, median of up to 40 samples each; h200.csv",
            list(kernels()),
            {"ours": "cupyops", "other": "torch.compile"},
        ),
    }


@app.command("plots")
def write_plots() -> None:
    """Write the plots."""
    for name, text in plots().items():
        (ASSETS / name).write_text(text, encoding="utf-8")


# --- the terminal ---

CHECK = "python -m cupyops check softabs:softabs --only accuracy --backend simulator"
FORWARD, BACKWARD = (
    "y[i] = from_acc<T>((v + sqrt(v * v + b)) / 2);",
    "(1 + v / sqrt(v * v + b)) / 2",
)
REFERENCE = "(x + torch.sqrt(x * x + b)) / 2"


class Scene(NamedTuple):
    """A command, what is said before it, what is edited before it: (file, old, new)."""

    said: str
    edits: tuple[tuple[str, str, str], ...]
    command: str


SCENES = (
    Scene("A new operator, to edit:", (), "python -m cupyops new softabs"),
    Scene(
        "Make it sqrt(x^2 + b), with a typo in the kernel:",
        (
            ("softabs.py", f"return {REFERENCE}", "return torch.sqrt(x * x + b)"),
            ("softabs.cu", FORWARD, "y[i] = from_acc<T>(std::sqrt(v * v + b));"),
        ),
        CHECK,
    ),
    Scene(
        "The typo is gone. The gradient is still the old one:",
        (("softabs.cu", "std::sqrt", "sqrt"),),
        CHECK,
    ),
    Scene("With the right gradient:", (("softabs.cu", BACKWARD, "v / sqrt(v * v + b)"),), CHECK),
)
WIDTH = 100  # columns


def _in_a_process(*words: str, cwd: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def session(
    python: Callable[..., subprocess.CompletedProcess[str]] = _in_a_process,
) -> Iterator[tuple[Scene, list[str]]]:
    """Each scene with the lines that its command prints, in a folder of its own, with no GPU; `python` runs it."""
    with TemporaryDirectory() as folder:
        paths = os.pathsep.join([folder, str(ROOT)])
        env = {**os.environ, "COLUMNS": str(WIDTH), "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
        for scene in SCENES:
            for name, old, new in scene.edits:
                path = Path(folder, name)
                text = path.read_text(encoding="utf-8")
                assert old in text, f"{name} of `cupyops new` has no longer: {old}"
                path.write_text(text.replace(old, new), encoding="utf-8")
            done = python(*scene.command.split()[1:], cwd=folder, env=env)
            yield scene, (done.stdout + done.stderr).rstrip().splitlines()


def terminal(scenes: list[tuple[Scene, list[str]]]) -> str:
    """The session as an animated SVG: a scene after the other, each shown for some seconds, again and again."""
    line, char, each = 19, 8.43, 5.0
    rows = max(len(lines) for _, lines in scenes) + 3
    width, height = int(WIDTH * char) + 40, rows * line + 60
    total = each * len(scenes)
    rules, groups = [], []
    for k, (scene, lines) in enumerate(scenes):
        start, end = 100 * k / len(scenes), 100 * (k + 1) / len(scenes)
        before = f"0%, {start - 0.01:.2f}% {{ opacity: 0 }} " if k else ""
        after = f" {end:.2f}%, 100% {{ opacity: 0 }}" if k + 1 < len(scenes) else ""
        rules.append(f"@keyframes scene{k} {{ {before}{start:.2f}%, {end - 0.01:.2f}% {{ opacity: 1 }}{after} }}")
        rules.append(f".scene{k} {{ opacity: {int(not after)}; animation: scene{k} {total:.0f}s step-end infinite; }}")
        shown = [("said", f"# {scene.said}"), ("typed", f"$ {scene.command}")] + [
            (mood(text), text) for text in map(cut, lines)
        ]
        texts = [
            f'<text class="{kind}" x="20" y="{58 + line * n}">{escape(text)}</text>'
            for n, (kind, text) in enumerate(shown)
        ]
        groups.append(f'<g class="scene{k}">' + "\n".join(texts) + "</g>")
    dots = "".join(
        f'<circle cx="{20 + 18 * k}" cy="18" r="5.5" fill="{c}"/>'
        for k, c in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    style = "\n".join(
        [
            "text { font: 14px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; white-space: pre; }",
            "text { fill: #e6edf3; }",
            ".said { fill: #8b949e; } .typed { fill: #79c0ff; } .bad { fill: #ff7b72; } .good { fill: #56d364; }",
            *rules,
        ]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" xml:space="preserve" role="img" '
        'aria-label="A session: new, a compile error, a check that fails, a check that passes">\n'
        f"<style>{style}</style>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#161b22"/>{dots}\n' + "\n".join(groups) + "\n</svg>\n"
    )


def cut(line: str) -> str:
    """A line as wide as the terminal."""
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def mood(line: str) -> str:
    """The colour of a line."""
    if "error" in line or "fail " in line:
        return "bad"
    return "good" if line.split()[1:2] == ["simulator"] and "pass" in line or "0 failed" in line else "plain"


@app.command("terminal")
def write_terminal() -> None:
    """Run the session and write it."""
    (ASSETS / "terminal.svg").write_text(terminal(list(session())), encoding="utf-8")


# --- a race ---

RACE = """// The sum of each block of 256 numbers.
__global__ void block_sum(const float* x, float* sums, int n) {
  __shared__ float part[256];
  const int t = threadIdx.x, i = blockIdx.x * 256 + t;
  part[t] = i < n ? x[i] : 0;
  __syncthreads();
  for (int half = 128; half > 0; half /= 2) {
    if (t < half) part[t] += part[t + half];
  }
  if (t == 0) sums[blockIdx.x] = part[0];
}
"""
RACE_SIZE = (1000, 778)
RACE_ARGUMENTS = (
    "block_sum.cu block_sum --grid 4 --block 256 --arg randn(1000) --arg empty(4) --arg 1000 --html race.html"
)


def browser() -> str | None:
    """A Chromium of this machine."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


@app.command("race")
def write_race() -> None:
    """Run a kernel that lacks a barrier in the simulator, and photograph the page."""
    chromium = browser()
    if chromium is None:
        raise typer.BadParameter("no Chromium was found: install it, as with `apt-get install chromium`")
    with TemporaryDirectory() as folder:
        Path(folder, "block_sum.cu").write_text(RACE, encoding="utf-8")
        words = [sys.executable, "-m", "cupyops", "simulate", *RACE_ARGUMENTS.split()]
        done = subprocess.run(
            words, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert "Race" in done.stdout + done.stderr, done.stdout + done.stderr
        shot = ASSETS / "race.png"
        window = f"--window-size={RACE_SIZE[0]},{RACE_SIZE[1]}"
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", window, f"--screenshot={shot}"]
        subprocess.run([chromium, *options, "race.html"], cwd=folder, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    app()
