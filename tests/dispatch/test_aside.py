"""Copies beside kernels: what they write, and that a recording of a call has them as steps."""

import torch

from cupyops._dispatch import aside
from cupyops._operator.derivation.recorder import Recorder


def test_a_matrix_is_dealt_to_others():
    """Columns of so many become matrices of their own, the last of fewer."""
    source, to = torch.arange(3 * 8.0).view(3, 8)[:, :7], torch.full((60,), -1.0)
    aside.deal_(to, source, 1, 5, 3, 20)
    for number, columns in enumerate((3, 3, 1)):
        matrix = to[20 * number :][: 5 * columns].view(5, columns)
        assert torch.equal(matrix[1:4], source[:, 3 * number :][:, :columns])
        assert matrix[0].eq(-1).all() and matrix[4].eq(-1).all()


def test_they_are_steps_of_a_recording():
    a, b = torch.randn(4, 6), torch.zeros(4, 3)

    def copied():
        aside.begin_(a)
        aside.copy_(b, a[:, 2:5])
        aside.end_(a)
        return b

    result, recording = Recorder([a, b], launches=False).run(copied)
    assert torch.equal(result, a[:, 2:5])
    expected = [aside.begin_, aside.copy_, aside.end_]
    assert [step.function for step in recording.steps if step.function in expected] == expected
