"""The report as text: a line for each instruction, and one for each section."""

from __future__ import annotations

from typing import Any

_COUNTED = ("cases", "count", "mismatches", "nan_payloads", "max_ulp", "mean_ulp", "scaled_ulp", "errors")


def instruction(name: str) -> str:
    """What a line of the table is about: cases that differ in values, lanes or places are one."""
    words = name.split(" ")
    return " ".join(words[:3]) if words[0] == "cp.async.bulk.tensor" else words[0]


def grouped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each instruction of a section."""
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = instruction(row["name"]), row["how"]
        line = lines.setdefault(key, dict.fromkeys(_COUNTED, 0) | {"name": key[0], "how": row["how"]})
        whole = line["count"] + row["count"]
        if whole:
            line["mean_ulp"] = (line["mean_ulp"] * line["count"] + row["mean_ulp"] * row["count"]) / whole
        for field in ("count", "mismatches", "nan_payloads"):
            line[field] += row[field]
        for field in ("max_ulp", "scaled_ulp"):
            line[field] = max(line[field], row[field])
        line["cases"] += 1
        line["errors"] += bool(row["error"])
    return list(lines.values())


def markdown(report: dict[str, Any]) -> str:
    """The whole report for a page: a summary, then what does not agree to the bit, instruction by instruction."""
    where = report.get("device", {})
    text = [
        f"On {where.get('gpu', 'no GPU')}, driver for CUDA {where.get('cuda', '?')}; PTX of NVRTC {report['nvrtc']}.",
        "",
    ]
    text += [
        "| section | cases | values | agree to the bit | NaN of other bits | differ | errors |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, rows in report["sections"].items():
        count, wrong, nan = (sum(row[field] for row in rows) for field in ("count", "mismatches", "nan_payloads"))
        errors = sum(bool(row["error"]) for row in rows)
        text.append(f"| {name} | {len(rows)} | {count} | {count - wrong - nan} | {nan} | {wrong} | {errors} |")
    text += ["", *_exact(report), "", *_approximate(report)]
    return "\n".join(text) + "\n"


def _exact(report: dict[str, Any]) -> list[str]:
    """What should agree to the bit, and does not."""
    text = ["Should agree to the bit and does not:", ""]
    lines = [
        f"| `{line['name']}` | {line['count']} | {line['mismatches']} | {line['nan_payloads']} | {line['max_ulp']:g} "
        f"| {line['errors']} |"
        for rows in report["sections"].values()
        for line in grouped(rows)
        if line["how"] == "bits" and (line["mismatches"] or line["errors"])
    ]
    if not lines:
        return ["Everything that should agree to the bit does, the bits of NaN aside."]
    return [
        *text,
        "| instruction | values | differ | NaN of other bits | max ulp | errors |",
        "|---|--:|--:|--:|--:|--:|",
        *lines,
    ]


def _approximate(report: dict[str, Any]) -> list[str]:
    """Approximations, and sums in another order."""
    text = ["Approximations (the simulator rounds correctly) and sums (the simulator rounds once):", ""]
    text += [
        "| instruction | values | differ | max ulp | mean ulp | max, in ulp of the largest result |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for rows in report["sections"].values():
        for line in grouped(rows):
            if line["how"] != "bits":
                ulps = f"{line['max_ulp']:.6g} | {line['mean_ulp']:.3g} | {line['scaled_ulp']:.3g}"
                text.append(f"| `{line['name']}` | {line['count']} | {line['mismatches']} | {ulps} |")
    return text
