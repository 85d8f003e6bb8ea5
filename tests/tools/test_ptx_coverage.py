"""The table of what PTX has and the simulator covers."""

import re

import pytest

from cupyops.simulator import Program, UnsupportedInstruction
from tools import ptx_coverage


def test_the_page_has_the_current_table():
    text = ptx_coverage.PAGE.read_text()
    shown = text.split(ptx_coverage.BEGIN)[1].split(ptx_coverage.END)[0].strip()
    assert shown == ptx_coverage.table(), "run tools/ptx_coverage.py --write"


def test_each_line_is_read_as_it_stands():
    names = [name for text in ptx_coverage.FORMS.values() for name in ptx_coverage.forms(text)]
    assert len(names) > 120 and not any(mark in name for name in names for mark in "%{|[")


def test_what_is_refused_is_told_with_what_to_do():
    every = [ptx for text in ptx_coverage.FORMS.values() for ptx in ptx_coverage.forms(text).values()]
    for ptx in (one for one in every if not ptx_coverage.covered(one)):
        with pytest.raises(
            UnsupportedInstruction, match=rf"form: .+ \({re.escape(ptx.split()[0])}\) are not covered: \w"
        ):
            Program(ptx_coverage.KERNEL.format(ptx + ";")).kernel("form")


def test_what_is_known_to_be_covered_or_not():
    assert ptx_coverage.covered("add.s32 %r1, %r2, %r3")
    assert not ptx_coverage.covered("tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f5, %f6}]")
