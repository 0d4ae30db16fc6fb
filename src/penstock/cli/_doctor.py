"""``penstock doctor``: what can be measured and controlled here, and the command that would fix what can't."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from penstock.cli._json import json_text

MARKS = {
    "ok": "yes",
    "estimated": "estimated",
    "limited": "not allowed",
    "absent": "none",
    "broken": "broken",
}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say what energy can be measured and which power limits can be set on this machine.

    Exit code: 0 if every device found is measured by its own counter and every power limit there is can be set;
    1 if it works, but something is estimated or not allowed (the report has the fix); 2 if a device is there that
    can't be read.
    """
    from penstock.energy import State, examine

    findings = examine()
    states = {state for finding in findings for state in (finding.measure, finding.control)}
    code = 2 if State.BROKEN in states else 1 if states & {State.ESTIMATED, State.LIMITED} else 0
    if as_json:
        print(json_text({"exit_code": code, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        for finding in findings:
            print(f"{finding.subject}: energy {MARKS[finding.measure]}, power limit {MARKS[finding.control]}")
            if finding.detail:
                print(f"  {finding.detail}")
            if finding.fix:
                print(f"  fix: {finding.fix}")
        print(
            {
                0: "All that is here is measured.",
                1: "It works, with the restrictions above.",
                2: "Something is broken: see above.",
            }[code]
        )
    raise typer.Exit(code)
