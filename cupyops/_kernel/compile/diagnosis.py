"""A compile error, told from the .cu file: the line, a caret, a hint at the cure; NVRTC's log for what that leaves out."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import TypeGuard

from .declarations import Function, functions, split
from .hints import NAMES, hint_for, placeholder
from .source import Source, strip_comments

_MESSAGE = re.compile(
    r"^(?P<file>\S[^\n]*?)\((?P<line>\d+)\): (?P<severity>(?:catastrophic )?error|warning).*?: (?P<text>.*)$"
)
_PLACELESS = re.compile(r"^(?:ptxas|At end of source:) (?P<severity>error|fatal)\s*: (?P<text>.*)$")
_COUNT = re.compile(r"\d+ (catastrophic )?errors? detected in the compilation|Compilation terminated")
# what follows from another error, and says nothing by itself
_CONSEQUENCE = re.compile(r"Error in parsing name expression|Name expression cannot form address")


def explain(source: Source, name: str, arch: str, log: str) -> str:
    """NVRTC's log as a message: file:line, the excerpt with a caret, a hint; then, in NVRTC's words, what else it says."""
    blocks = list(_blocks(log.rstrip("\0").splitlines()))
    direct = [block for match, block in blocks if _is_error(match) and not _CONSEQUENCE.match(match["text"])]
    parts = [f"{source.name}: kernel {name} does not compile for {arch}"]
    left: list[str] = []
    told: set[str | None] = {None}
    for match, block in blocks:
        if not _is_error(match):
            left += [line for line in block if not (direct and _COUNT.match(line))]
            continue
        if direct and block not in direct:
            continue
        place, hint, rest = _place(source, name, match, block[1:])
        parts += ["\n" + place] + ([] if hint in told else [f"  hint: {hint}"])
        told.add(hint)
        left += rest
    if left:
        parts.append("\nNVRTC's log:\n" + "\n".join("  " + line for line in left))
    return "\n".join(parts)


def _blocks(lines: list[str]) -> Iterator[tuple[re.Match[str] | None, list[str]]]:
    """Each message of the log with the lines that belong to it; without a match, what belongs to none."""
    head: re.Match[str] | None = None
    block: list[str] = []
    for line in filter(str.strip, lines):
        match = _MESSAGE.match(line) or _PLACELESS.match(line)
        if match is not None or _COUNT.match(line):
            if block:
                yield head, block
            head, block = match, []
        block.append(line)
    if block:
        yield head, block


def _is_error(match: re.Match[str] | None) -> TypeGuard[re.Match[str]]:
    return match is not None and match["severity"] != "warning"


def _place(source: Source, name: str, match: re.Match[str], after: list[str]) -> tuple[str, str | None, list[str]]:
    """An error with its line and a caret below it, a hint, and the part of NVRTC's message that this does not hold."""
    severity, text = match["severity"], match["text"]
    if match.re is _PLACELESS:
        return f"{source.name}: {severity}: {text}", hint_for(text), after
    file, number = match["file"], int(match["line"])
    if file == NAMES:
        hint = _of_template(source, name) if "which instance of function template" in text else None
        return f"{source.name}: {severity}: {text}\n{_kernels(source, name)}", hint or hint_for(text, file), []
    place = f"{file}:{number}: {severity}: {text}"
    excerpt = source.line(file, number)
    under = next((index for index, line in enumerate(after[:3]) if line.strip() == "^"), None)
    if excerpt is None or under is None:
        shown = "" if excerpt is None else f"\n  {number:>5} | {excerpt.strip()}"
        return place + shown, hint_for(text, file), [match.string, *after] if after else []
    # NVRTC strips the excerpt's indent and indents by two; the caret stands under that text
    shown = excerpt.strip()
    printed = next((line for line in after[:2] if line.strip() == shown), "")
    column = max(0, after[under].index("^") - (len(printed) - len(printed.lstrip())))
    word = re.match(r"\w*", shown[column:])
    hint = placeholder(shown) or hint_for(text, file, word.group() if word else "", shown[column:])
    if text == 'expected a ";"' and column == 0:
        hint = _unended(source, file, number)
    lines = [place, f"  {number:>5} | {shown}", f"        | {' ' * column}^"]
    context = textwrap.dedent("\n".join(after[under + 1 :]))  # which templates led there
    return "\n".join(lines + ([textwrap.indent(context, "  ")] if context else [])), hint, []


def _unended(source: Source, file: str, number: int) -> str | None:
    """Name the line that lacks the `;` noticed at the first word of the next one."""
    text = source.text if file == source.name else source.includes[file]
    before = [index for index, line in enumerate(strip_comments(text).splitlines()[: number - 1], 1) if line.strip()]
    return f"a ; is missing at the end of line {before[-1]}" if before else None


def _kernels(source: Source, name: str) -> str:
    """List the kernels that could have been asked for instead."""
    found = dict.fromkeys(function.name + _parameters(function) for function in functions(source))
    return f"  asked for: {name}; the text has: {', '.join(found) or 'no __global__ function'}"


def _parameters(function: Function) -> str:
    """`<typename T, N>`; nothing for what is no template."""
    shown = ", ".join(f"{'typename ' if one.is_type else ''}{one.name}" for one in function.template)
    return f"<{shown}>" if shown else ""


def _of_template(source: Source, name: str) -> str | None:
    """Advise on template arguments that do not suit the template in number or order."""
    asked, _, inside = name.partition("<")
    one = next((one for one in functions(source) if one.name == asked.rpartition("::")[2] and one.template), None)
    if one is None:
        return None
    written = f'Kernel(code, "{asked}<{", ".join(part.name for part in one.template)}>")'
    if not inside:
        return f"the kernel is a template{_parameters(one)}; name its parameters, as in {written}"
    given, least = len(split(inside.rpartition(">")[0])), sum(not part.has_default for part in one.template)
    if given < least:
        return f"the template has {len(one.template)} parameters, of which {given} came; write {written}"
    return f"the template's parameters are {_parameters(one)}, in this order; write {written}"
