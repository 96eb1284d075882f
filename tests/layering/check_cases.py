#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds tests/CASES.md and the tests together: check_cases.py SOURCE_FOLDER

Every test named in the table exists in the file that the table names, and every test whose name holds a case's id is in the table.
"""
import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1])
row = re.compile(r"^\| (CO-\d{3}) \| `([^`]+)` \| `([^`]+)` \| ")
listed, troubles = set(), []
for number, line in enumerate((root / "tests/CASES.md").read_text().splitlines(), 1):
    if not line.startswith("| CO-"):
        continue
    match = row.match(line)
    if not match:
        troubles.append(f"CASES.md:{number}: not of the form | CO-000 | `file` | `Suite.Test` | state |")
        continue
    case, file, test = match.groups()
    path, name = root / file, test.split(".")[-1]
    if not path.is_file() or name not in path.read_text():
        troubles.append(f"CASES.md:{number}: no test {test} in {file}")
    listed.add((case, file))

for path in sorted((root / "tests").rglob("*_test.cc")):
    file = path.relative_to(root).as_posix()
    for name in re.findall(r"TEST(?:_F|_P)?\(\s*\w+,\s*(\w+)\)", path.read_text()):
        for digits in re.findall(r"CO_(\d{3})", name):
            if (f"CO-{digits}", file) not in listed:
                troubles.append(f"{file}: {name} is not in CASES.md")

print("\n".join(troubles) if troubles else f"{len(listed)} pairs of case and file, all there")
sys.exit(1 if troubles or not listed else 0)
