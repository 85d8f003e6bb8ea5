"""The forms of batch_norm: how a channel's elements lie, and which threads reduce them."""

from __future__ import annotations

from .batch_norm_nchw import (
    NchwClusterBackward,
    NchwClusterForward,
    NchwInference,
    NchwInferenceBackward,
    NchwTwoPassBackward,
    NchwTwoPassForward,
)
from .batch_norm_nhwc import (
    NhwcClusterBackward,
    NhwcClusterForward,
    NhwcInference,
    NhwcInferenceBackward,
    NhwcInline,
    NhwcTwoPassBackward,
    NhwcTwoPassForward,
)
from .batch_norm_problem import Backward, BatchNormForm, Forward, Problem
from .batch_norm_problem import problem_of as problem_of
from .batch_norm_problem import too_large as too_large
from .forms import Forms
from .gpu import Gpu

FORWARD = Forms(
    "batch_norm",
    "forward",
    [NhwcClusterForward(), NhwcTwoPassForward(), NchwClusterForward(), NchwTwoPassForward()],
)
BACKWARD = Forms(
    "batch_norm",
    "backward",
    [NhwcClusterBackward(), NhwcInline(), NhwcTwoPassBackward(), NchwClusterBackward(), NchwTwoPassBackward()],
)
INFERENCE = Forms("batch_norm", "inference", [NhwcInference(), NchwInference()])
INFERENCE_BACKWARD = Forms("batch_norm", "inference_backward", [NhwcInferenceBackward(), NchwInferenceBackward()])


def run(forms: Forms[Problem], problem: Problem, gpu: Gpu, of: Forward | Backward) -> None:
    """Compute a problem by the form that is chosen for it."""
    form = forms.choose(problem, gpu)
    assert isinstance(form, BatchNormForm)
    form.run(problem, gpu, of)
