"""A compile error, told from the .cu file: the line, a caret, a hint at the cure, then NVRTC's own words."""

from __future__ import annotations

import re

from .hints import NAMES, hint_for
from .source import Source, strip_comments

_MESSAGE = re.compile(
    r"^(?P<file>\S[^\n]*?)\((?P<line>\d+)\): (?P<severity>(?:catastrophic )?error|warning).*?: (?P<text>.*)$"
)
_PTXAS = re.compile(r"^ptxas (?P<severity>error|fatal)\s*: (?P<text>.*)$")
_KERNEL = re.compile(r"__global__(?:(?!__global__)[^;{}])*?\b(?!__launch_bounds__|__cluster_dims__)(\w+)\s*\((?!\()")


def explain(source: Source, name: str, arch: str, log: str) -> str:
    """NVRTC's log as a message: file:line, the excerpt with a caret, a hint, then NVRTC's own words."""
    parts = [f"{source.name}: kernel {name} does not compile for {arch}"]
    lines = log.rstrip("\0").splitlines()
    told: set[str | None] = {None}
    for index, line in enumerate(lines):
        match = _MESSAGE.match(line) or _PTXAS.match(line)
        if match is None or match["severity"] == "warning":
            continue
        if match["text"].startswith("Error in parsing name expression"):
            continue  # the message before it says of what
        place, word = _place(source, name, match, lines[index + 1 : index + 4])
        hint = hint_for(match["text"], match.groupdict().get("file", ""), word)
        parts += ["\n" + place] + ([] if hint in told else [f"  hint: {hint}"])
        told.add(hint)
    parts.append("\nNVRTC's log:\n" + "\n".join("  " + line for line in lines if line.strip()))
    return "\n".join(parts)


def _place(source: Source, name: str, match: re.Match[str], after: list[str]) -> tuple[str, str]:
    """An error with its line and a caret below it, and the word to which the caret points."""
    severity, text = match["severity"], match["text"]
    if match.re is _PTXAS:
        return f"{source.name}: {severity}: {text}", ""
    if match["file"] == NAMES:
        return f"{source.name}: {severity}: {text}\n{_kernels(source, name)}", ""
    file, number = match["file"], int(match["line"])
    place = f"{file}:{number}: {severity}: {text}"
    excerpt = source.line(file, number)
    if excerpt is None:
        return place, ""
    # NVRTC strips the excerpt's indent and indents by two; the caret stands under that text
    shown = excerpt.strip()
    place += f"\n  {number:>5} | {shown}"
    caret = next((line.index("^") for line in after if line.strip() == "^"), None)
    if caret is None:
        return place, ""
    printed = next((line for line in after[:2] if line.strip() == shown), "")
    column = max(0, caret - (len(printed) - len(printed.lstrip())))
    word = re.match(r"\w*", shown[column:])
    return f"{place}\n        | {' ' * column}^", word.group() if word else ""


def _kernels(source: Source, name: str) -> str:
    """What could have been asked for instead."""
    texts = [source.text, *source.includes.values()]
    found = dict.fromkeys(kernel for text in texts for kernel in _KERNEL.findall(strip_comments(text)))
    return f"  asked for: {name}; the text has: {', '.join(found) or 'no __global__ function'}"
