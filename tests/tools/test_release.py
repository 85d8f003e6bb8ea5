"""tools/release.py: what is left to do is told, nothing is published before, and a wrong distribution is found."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import trove_classifiers
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import readme
import release

import cupyops

ROOT = Path(__file__).resolve().parents[2]
READY = {
    "cupyops/__init__.py": '__version__ = "1.2.3"\n',
    "CITATION.cff": "cff-version: 1.2.0\nversion: 1.2.3\n",
    "CHANGELOG.md": "# Changelog\n\n## [1.2.3] - 2026-11-30\n\n### Added\n\n- All.\n\n## [1.2.2] - 2026-10-30\n",
    "pyproject.toml": (
        '[project]\nname = "x"\nclassifiers = ["Programming Language :: Python :: 3.11"]\n'
        '[project.urls]\nRepository = "https://github.com/x/x"\n'
    ),
    "tests/matrix.csv": 'python,tests\n3.11,"8 passed, 1 skipped"\n3.12,not tested\n3.13,"1 failed, 7 passed"\n',
    "tools/gpu_report.py": "print('passed')\n",
    "README.md": "[a page](docs/a.md)\n",
    **dict.fromkeys(("LICENSE", "SECURITY.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md"), "text\n"),
}


def git(root, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)


@pytest.fixture
def ready(tmp_path):
    """A project in small that could be released."""
    for name, text in READY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def test_nothing_is_left_to_do(ready, capsys):
    assert release.check(ready)
    assert "to do" not in capsys.readouterr().out


LEFT = {
    "a version that pip would not order": (
        "cupyops/__init__.py", '__version__ = "1.2"\n', "version", "expected the form 1.2.3",
    ),
    "another version cited": ("CITATION.cff", "version: 1.2.2\n", "version", "write version: 1.2.3"),
    "no date": ("CHANGELOG.md", "## [1.2.3] - unreleased\n\n- All.\n", "changelog", "write the date"),
    "a section of an older version": (
        "CHANGELOG.md", "## [1.2.2] - 2026-10-30\n\n- All.\n", "changelog", "a section [1.2.3]",
    ),
    "a section without lines": ("CHANGELOG.md", "## [1.2.3] - 2026-11-30\n", "changelog", "has no lines"),
    "no file of conduct": ("CODE_OF_CONDUCT.md", "", "files", "there is no CODE_OF_CONDUCT.md"),
    "a placeholder": (
        "pyproject.toml",
        '[project]\n[project.urls]\nRepository = "https://git.example.org/x"\n',
        "public URL",
        "a placeholder",
    ),
    "a page of before": (
        "README.md",
        "It is not published yet: pip install git+URL\n",
        "published",
        "these say that it is not published, or install it by git+URL: README.md",
    ),
    "a host that is not known": (
        "pyproject.toml",
        '[project]\n[project.urls]\nRepository = "https://git.somewhere.net/x"\n',
        "links of the README",
        "1 links and pictures of README.md lead nowhere on the index",
    ),
    "a Python that was not tested": (
        "pyproject.toml",
        READY["pyproject.toml"].replace("3.11", "3.12"),
        "classifiers",
        "remove the classifier of Python 3.12: tests were not run with it",
    ),
    "a Python that nobody names": (
        "tests/matrix.csv",
        "python,tests\n3.11,8 passed\n3.14,8 passed\n",
        "classifiers",
        "add the classifier of Python 3.14: tests passed with it",
    ),
    "what is not committed": ("more.txt", "text", "clean tree, new tag", "not committed"),
    "tests of a GPU that failed": ("tools/gpu_report.py", "raise SystemExit('stale')\n", "GPU report", "stale"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_to_do(case, ready, capsys):
    file, text, name, said = LEFT[case]
    (ready / file).write_text(text)
    assert said in "\n".join(release.CHECKS[name](ready))
    assert not release.check(ready)
    assert f"to do  {name}\n" in capsys.readouterr().out


def test_a_version_that_is_tagged(ready):
    git(ready, "tag", "v1.2.3")
    assert list(release.tree(ready)) == ["v1.2.3 is tagged already; raise __version__"]


def test_nothing_is_published_before_all_is_done(ready, capsys, monkeypatch):
    (ready / "CHANGELOG.md").write_text("")
    monkeypatch.setattr(release, "build", None)  # is not come to
    assert release.publish(ready, ready / "dist", None, []) == 1
    assert "nothing is published before" in capsys.readouterr().out


def test_what_is_published_is_shown_and_asked_for(ready, capsys, monkeypatch):
    run = []
    monkeypatch.setattr(release, "build", lambda root, out: [out / "x.whl"])
    monkeypatch.setattr(release, "docs", lambda root: None)
    monkeypatch.setattr(release, "trial", lambda out, before: run.append([before]))
    monkeypatch.setattr(release.importlib.util, "find_spec", lambda name: name)
    for answer, status in (("n", 1), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda text, answer=answer: answer)
        monkeypatch.setattr(
            release.subprocess,
            "run",
            lambda words, **_: run.append(words) or subprocess.CompletedProcess(words, 0, "", ""),
        )
        monkeypatch.setattr(release, "check", lambda root: True)
        assert release.publish(ready, ready / "dist", "trial", ["torch"]) == status
    shown = capsys.readouterr().out
    assert "upload --repository trial" in shown and "git tag --annotate v1.2.3" in shown
    assert [words[-1] for words in run if words[0] == "git"] == ["cupyops 1.2.3", "v1.2.3"]
    # tried before each question, the rest after the yes
    assert run[:2] == [[["torch"]], [["torch"]]] and len(run) == 2 + 4


def wheel(path, version="1.2.3", more=()):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x-1.dist-info/METADATA", f"Metadata-Version: 2.4\nName: x\nVersion: {version}\n")
        archive.writestr("x-1.dist-info/licenses/LICENSE", "text")
        for name in more:
            archive.writestr(name, "text")
    return path


def test_a_distribution_is_examined(ready, tmp_path):
    whole = wheel(tmp_path / "a.whl")
    assert list(release.examine(whole, ready)) == []
    (old,) = release.examine(wheel(tmp_path / "b.whl", version="1.2.2"), ready)
    (stray,) = release.examine(wheel(tmp_path / "c.whl", more=["x/__pycache__/a.pyc", "x/a.cubin"]), ready)
    assert "expected 1.2.3" in old and "x/a.cubin, expected source alone" in stray
    with tarfile.open(tmp_path / "d.tar.gz", "w:gz") as archive:
        (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: x\nVersion: 1.2.3\n")
        archive.add(tmp_path / "PKG-INFO", "x-1.2.3/PKG-INFO")
    assert list(release.examine(tmp_path / "d.tar.gz", ready)) == ["d.tar.gz has no LICENSE"]


def test_a_folder_that_holds_something_is_not_built_into(ready, tmp_path):
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "old.whl").write_text("")
    with pytest.raises(SystemExit, match="holds old.whl"):
        release.build(ready, tmp_path / "dist")


def test_the_docs_are_built_as_the_makefile_says(ready):
    """With this interpreter, and what they end with is what the release ends with."""
    (ready / "Makefile").write_text('docs:\n\t$(PY) -c \'open("built", "w")\'\nPY = $(PYTHON)\n')
    release.docs(ready)
    assert (ready / "built").exists()
    (ready / "Makefile").write_text("docs:\n\texit 1\n")
    with pytest.raises(SystemExit, match="do not build"):
        release.docs(ready)
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "docs", "PYTHON=here"], cwd=ROOT, capture_output=True, text=True
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["here", "here"] and "zensical" in done.stdout


@pytest.fixture
def tried(ready, monkeypatch):
    """(the folder of an sdist, the commands of its trial, which none of them runs)."""
    out, commands = ready / "dist", []
    (ready / "tests").mkdir(exist_ok=True)
    for name in ("PKG-INFO", "cuda_src/a.cu"):
        (ready / name).parent.mkdir(exist_ok=True)
        (ready / name).write_text("text")
    out.mkdir()
    with tarfile.open(out / "x-1.2.3.tar.gz", "w:gz") as archive:
        for name in ("PKG-INFO", "cupyops", "cuda_src", "tests"):
            archive.add(ready / name, f"x-1.2.3/{name}")

    def run(words, cwd, env):
        commands.append((words[1:], sorted(path.name for path in Path(cwd).iterdir()), env))
        return subprocess.CompletedProcess(words, int("fails" in words))

    monkeypatch.setattr(release.venv, "create", lambda folder, with_pip: None)
    monkeypatch.setattr(release.subprocess, "run", run)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    return out, commands


def test_the_sdist_is_installed_and_its_tests_run_without_its_package(tried):
    out, commands = tried
    release.trial(out, ["torch==2.13.0"])
    first, second, *rest = (words for words, *_ in commands)
    assert first[-1] == "torch==2.13.0" and second[-1] == f"{(out / 'x-1.2.3.tar.gz').resolve()}[cuda12x,test]"
    assert [words[1] for words in rest] == ["cupyops", "pytest", "pip"]
    ((_, there, environ),) = (each for each in commands if each[0][1] == "pytest")
    assert there == ["PKG-INFO", "tests"] and "PYTHONPATH" not in environ
    assert all((ROOT / name).is_file() for name in release.TRIED)


def test_a_trial_that_fails(tried):
    with pytest.raises(SystemExit, match="the trial failed with exit code 1; nothing is to be published"):
        release.trial(tried[0], ["fails"])
    assert len(tried[1]) == 1


def test_a_trial_of_nothing(tmp_path):
    with pytest.raises(SystemExit, match="holds 0 sdists, expected one"):
        release.trial(tmp_path, [])


@pytest.mark.parametrize(("url", "picture", "page"), [
    ("https://github.com/a/b", "https://github.com/a/b/raw/v1/p/x.png", "https://github.com/a/b/blob/v1/d/x.md#y"),
    ("https://gitlab.com/a/b.git", "https://gitlab.com/a/b/-/raw/v1/p/x.png", "https://gitlab.com/a/b/-/blob/v1/d/x.md#y"),
    ("https://codeberg.org/a/b/", "https://codeberg.org/a/b/raw/tag/v1/p/x.png", "https://codeberg.org/a/b/src/tag/v1/d/x.md#y"),
])  # fmt: skip
def test_links_become_absolute(url, picture, page):
    text = "![a](p/x.png) [b](d/x.md#y) [c](https://e.org/z) [d](#here)\n```python\nf[g](x)\n```\n`f[g](x)`\n"
    assert list(readme.relative(text)) == ["p/x.png", "d/x.md#y"]
    assert readme.absolute(text, url, "v1") == text.replace("p/x.png", picture).replace("d/x.md#y", page)


def test_the_build_has_the_absolute_links(ready, capsys):
    metadata = {"urls": {"Repository": "https://github.com/x/x"}}
    readme.Readme(str(ready), {}).update(metadata)
    assert metadata["readme"]["text"] == "[a page](https://github.com/x/x/blob/v1.2.3/docs/a.md)\n"
    assert metadata["readme"]["content-type"] == "text/markdown" and capsys.readouterr().err == ""
    readme.Readme(str(ready), {}).update(metadata := {"urls": {"Repository": "https://git.example.org/x"}})
    assert metadata["readme"]["text"] == READY["README.md"]
    assert "1 links and pictures lead nowhere on a package index" in capsys.readouterr().err


def test_every_link_of_this_readme_is_rewritten():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = list(readme.relative(text))
    assert len(found) > 20 and all((ROOT / link.partition("#")[0]).exists() for link in found)
    assert not list(readme.relative(readme.absolute(text, "https://github.com/x/x", "v1")))


def test_this_version_is_one_everywhere():
    assert list(release.versions(ROOT)) == [] and release.version(ROOT) == cupyops.__version__
    assert list(release.files(ROOT)) == []


def test_the_classifiers():
    """Classifiers name what was tested, and are known to the index."""
    assert list(release.classifiers(ROOT)) == []
    assert set(release._project(ROOT)["classifiers"]) <= trove_classifiers.classifiers


def test_the_citation():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= cited.keys()
    assert cited["license"] == "MIT" and all("name" in author for author in cited["authors"])


@pytest.mark.parametrize("name", ["bug", "idea"])
def test_the_templates_of_issues(name):
    """As forms want it: each field of a known type, with an id of its own and a label."""
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
    assert form["name"] and form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    for field in form["body"]:
        assert field["type"] in {"textarea", "dropdown", "checkboxes"} and field["attributes"]["label"]


def test_the_url_stands_in_one_place():
    """Whoever gives the repository a home changes one line."""
    listed = [path for path in ROOT.glob("*.*") if path.suffix in {".toml", ".md", ".cff", ".yml"}]
    assert [path.name for path in listed if release.PLACEHOLDER in path.read_text(encoding="utf-8")] == [
        "pyproject.toml"
    ]
