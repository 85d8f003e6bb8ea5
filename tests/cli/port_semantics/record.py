"""Run the functions of `functions.cu` with a C++ compiler, and record what they give in `results.json`.

python tests/cli/port_semantics/record.py: it needs g++. The tests need none: they compare with what is recorded.
"""

import itertools
import json
import re
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
SAMPLES = {
    "int": [-100, -7, -1, 1, 2, 3, 4, 5, 8, 33],
    "unsigned": [0, 1, 6, 77, 4294967295],
    "long long": [-5000000003, -9, 4, 4294967299],
    "size_t": [0, 3, 9000000000],
    "uint64_t": [0, 12345678901234567890],
    "uint32_t": [1, 4026531841],
    "float": [-2.75, 0.0, 0.1, 1.7, 123456.789],
    "double": [-2.5, 0.0, 0.3, 7.9],
}
PRINTED = dict.fromkeys(("float", "double"), ("%.17g", "double"))
PRINTED |= dict.fromkeys(("unsigned", "size_t", "uint64_t"), ("%llu", "unsigned long long"))
ABOVE_ZERO = {"roots", "unsigned_countdown", "limit_changes", "instances", "ceiling"}  # elsewhere C++ has no result

_FUNCTION = re.compile(r"^(?:inline )?([\w ]+?) (\w+)\(([^()]*)\) \{", re.MULTILINE)


def functions(text):
    """(name, result, types of the arguments) of each function whose arguments and result are numbers."""
    found = []
    for result, name, arguments in _FUNCTION.findall(text):
        types = [" ".join(one.split("=")[0].split()[:-1]) for one in arguments.split(",") if one.strip()]
        if result in SAMPLES and all(one in SAMPLES for one in types) and "template" not in result:
            found.append((name, result, types))
    names = [name for name, _, _ in found]
    return [one for one in found if names.count(one[0]) == 1]


def samples(name, types):
    """Arguments: every pair of a few values, and of three arguments each in turn."""
    values = [SAMPLES[one] if len(types) < 3 else SAMPLES[one][2:8:2] for one in types]
    if name in ABOVE_ZERO:
        values = [[one for one in each if 0 <= one < 1000] for each in values]
    if name == "of_large_int":
        values = [[16777217, -16777219, 2147483647, 5]]
    return list(itertools.product(*values))


def main():
    text = (FOLDER / "functions.cu").read_text()
    lines = ["#include <cstdio>", text, "int main() {"]
    cases = []
    for name, result, types in functions(text):
        for given in samples(name, types):
            by_zero = any(one == 0 and kind not in ("float", "double") for kind, one in zip(types[1:], given[1:]))
            if name != "over_zero" and by_zero and "/" in text[text.index(f" {name}(") :].split("\n", 1)[0]:
                continue
            spelled = ", ".join(f"({kind})({one!r}{'ull' * (one > 2**31)})" for kind, one in zip(types, given))
            wide, cast = PRINTED.get(result, ("%lld", "long long"))
            lines.append(f'  std::printf("{wide}\\n", ({cast}){name}({spelled}));')
            cases.append((name, given))
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "x.cpp"), Path(folder, "x")
        source.write_text("\n".join([*lines, "}"]))
        subprocess.run(
            ["g++", "-std=c++17", "-O0", "-fwrapv", "-w", "-ffp-contract=off", source, "-o", program], check=True
        )
        printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    found = {}
    for (name, given), value in zip(cases, printed, strict=True):
        found.setdefault(name, []).append([list(given), value])
    text = ",\n".join(f'"{name}": {json.dumps(rows)}' for name, rows in found.items())
    (FOLDER / "results.json").write_text(f"{{\n{text}\n}}\n")
    print(f"{len(found)} functions, {len(cases)} results")


if __name__ == "__main__":
    main()
