"""docs/kernels.md says what is so: its Python runs, and prints what stands below it."""

import contextlib
import io
import re
from pathlib import Path

from cupyops import kernel

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page():
    executors = dict(kernel.executors)
    namespace, printed, compared = {}, "", 0
    try:
        for language, body in BLOCK.findall(TEXT):
            if language == "text":
                assert printed == body
                compared += 1
            else:
                output = io.StringIO()
                with contextlib.redirect_stdout(output):
                    exec(compile(body, "docs/kernels.md", "exec"), namespace)
                printed = output.getvalue()
    finally:
        namespace["simulation"].__exit__(None, None, None)
    assert compared == TEXT.count("```text") == 4 and kernel.executors == executors
