"""When recording or compiling a fused step repays itself (Hydro 4.2, lazy intra-trial fusion). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import final


class Form(StrEnum):
    """How a step runs."""

    PLAIN = "plain"
    RECORDED = "recorded"
    COMPILED = "compiled"


@final
@dataclass(frozen=True, slots=True)
class Pace:
    """What is known of a group's steps, in seconds; None: not measured yet.

    Attributes:
        plain_s: A step as it comes.
        recorded_s: A recorded step.
        compiled_s: A compiled step.
        spent_s: Time this group has spent in steps so far.
        record_cost_s: What recording took the last time, or may take.
        compile_cost_s: What compiling took the last time, or may take.
    """

    plain_s: float | None = None
    recorded_s: float | None = None
    compiled_s: float | None = None
    spent_s: float = 0.0
    record_cost_s: float = 1.0
    compile_cost_s: float = 60.0

    def best(self, remaining_steps: int, *, can_record: bool = True, can_compile: bool = True) -> Form:
        """How to run the next step.

        A form that was measured is taken if it is the fastest. One that was not is tried only when as much time as
        it costs has been spent already and three times as much is to come: then trying it at most doubles what
        hindsight would have spent, and leaving it spends four times as much at most, however long the group lives.
        """
        known = {
            form: seconds
            for form, seconds in (
                (Form.PLAIN, self.plain_s),
                (Form.RECORDED, self.recorded_s if can_record else None),
                (Form.COMPILED, self.compiled_s if can_compile else None),
            )
            if seconds is not None
        }
        if not known:
            return Form.PLAIN
        fastest = min(known, key=lambda form: known[form])
        ahead_s = remaining_steps * known[fastest]
        if can_record and self.recorded_s is None and min(self.spent_s, ahead_s / 3) > self.record_cost_s:
            return Form.RECORDED
        compiling = can_compile and can_record and self.recorded_s is not None and self.compiled_s is None
        if compiling and min(self.spent_s, ahead_s / 3) > self.compile_cost_s:
            return Form.COMPILED
        return fastest
