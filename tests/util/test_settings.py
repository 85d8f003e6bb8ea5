"""Settings of the environment: one parser, the same words everywhere, and an error for what is none of them."""

import os
from pathlib import Path

import pytest
from processes import run_python

from cupyops import InputError
from cupyops._kernel.launch import faults, reload
from cupyops._operator.derivation import plans
from cupyops._util import observed, settings

ON, OFF = ("1", "on", "true", "YES", " True "), ("0", "off", "False", "no", " OFF ")


@pytest.mark.parametrize(("texts", "value"), [(ON, True), (OFF, False), (("", " "), None)])
def test_flags(texts, value):
    assert [settings.DEBUG.read({"CUPYOPS_DEBUG": text}) for text in texts] == [value] * len(texts)


def test_a_flag_that_is_none():
    with pytest.raises(
        InputError, match="^CUPYOPS_PLANS is 'maybe', expected 1, on, true, yes, or 0, off, false, no; un"
    ):
        settings.PLANS.read({"CUPYOPS_PLANS": "maybe"})


@pytest.mark.parametrize("text", OFF)
def test_what_turns_a_setting_off_turns_each_off(monkeypatch, text):
    """It was `0` alone here, anything else there."""
    for name in ("DEBUG", "RELOAD", "PLANS"):
        monkeypatch.setenv(f"CUPYOPS_{name}", text)
    plainly = []
    monkeypatch.setattr(observed, "go_plainly", lambda: plainly.append(1))
    plans.off_if_asked()
    assert (faults.asked_for(), reload.wanted(), plainly) == (False, False, [1])


@pytest.mark.parametrize("text", ON)
def test_what_turns_a_setting_on_turns_each_on(monkeypatch, text):
    for name in ("DEBUG", "RELOAD", "PLANS"):
        monkeypatch.setenv(f"CUPYOPS_{name}", text)
    monkeypatch.setattr(observed, "go_plainly", lambda: pytest.fail("plans are on"))
    plans.off_if_asked()
    assert faults.asked_for() and reload.wanted()


@pytest.mark.parametrize(("text", "count"), [
    ("1000", 1000), ("2G", 2 << 30), ("500 MiB", 500 << 20), ("1.5k", 1536), ("3tb", 3 << 40), ("off", None),
    ("0", 0),
])  # fmt: skip
def test_sizes(text, count):
    assert settings.CACHE_LIMIT.read({"CUPYOPS_CACHE_LIMIT": text}, default=7) == count


@pytest.mark.parametrize("text", ["lots", "-1", "1 G B", "2x"])
def test_a_size_that_is_none(text):
    with pytest.raises(InputError, match=f"^CUPYOPS_CACHE_LIMIT is '{text}', expected a number of bytes"):
        settings.CACHE_LIMIT.read({"CUPYOPS_CACHE_LIMIT": text})


def test_folders(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    given = {"CUPYOPS_CACHE_DIR": "~/kernels", "CUPYOPS_CUBIN_PATH": os.pathsep.join(["/a", "", "~/b"])}
    assert settings.CACHE_DIR.read(given) == Path("/home/me/kernels")
    assert settings.CUBIN_PATH.read(given) == [Path("/a"), Path("/home/me/b")]


@pytest.mark.parametrize(("text", "value"), [("yes", True), ("off", False), ("sm_90a", "sm_90a"), ("", None)])
def test_an_architecture(text, value):
    assert settings.SIMULATE.read({"CUPYOPS_SIMULATE": text}) == value


def test_a_wrong_value_is_said_at_the_import():
    done = run_python("-c", "import cupyops", env=os.environ | {"CUPYOPS_DEBUG": "2"}, bare=True)
    assert done.returncode and "CUPYOPS_DEBUG is '2', expected 1, on, true, yes, or 0" in done.stderr
