"""Bubbles of pipeline-parallel jobs: what a host job says of them, and trials that run in them (``pk.bubbles``)."""

from penstock.plan._bubbles import (
    BubbleSchedule,
    Guest,
    Interval,
    Lent,
    Pipeline,
    beside,
    fitted_count,
    lend,
    recall,
)
from penstock.plan._bubbles import squeeze as squeeze_pass
from penstock.train._bubble_gate import Gate
from penstock.train._bubble_host import Host
from penstock.train._bubble_page import GuestUse
from penstock.train._pausing import squeeze_task as squeeze

__all__ = [
    "BubbleSchedule",
    "Gate",
    "Guest",
    "GuestUse",
    "Host",
    "Interval",
    "Lent",
    "Pipeline",
    "beside",
    "fitted_count",
    "lend",
    "recall",
    "squeeze",
    "squeeze_pass",
]
