"""Frozen values that the rooms exchange: trials, groups, plans, events, measurements, devices, errors."""

from penstock.core import errors
from penstock.core.clock import Clock, VirtualClock, WallClock
from penstock.core.device import Device, Share
from penstock.core.event import (
    Dropped,
    Ended,
    Event,
    Noted,
    Reported,
    Resized,
    Saved,
    SessionClosed,
    SessionOpened,
    Started,
    Submitted,
    from_record,
    to_record,
)
from penstock.core.group import Segment, TrialGroup
from penstock.core.measurement import Measurement, Source, total
from penstock.core.plan import Free, Placement, Plan, PlanPass, Resize, Running, Turn
from penstock.core.state import Counts, StudyState, TrialRecord, summary
from penstock.core.trial import Checkpoint, Config, Trial, TrialStatus, Values

__all__ = [
    "Checkpoint",
    "Clock",
    "Config",
    "Counts",
    "Device",
    "Dropped",
    "Ended",
    "Event",
    "Free",
    "Measurement",
    "Noted",
    "Placement",
    "Plan",
    "PlanPass",
    "Reported",
    "Resize",
    "Resized",
    "Running",
    "Saved",
    "Segment",
    "SessionClosed",
    "SessionOpened",
    "Share",
    "Source",
    "Started",
    "StudyState",
    "Submitted",
    "Trial",
    "TrialGroup",
    "TrialRecord",
    "TrialStatus",
    "Turn",
    "Values",
    "VirtualClock",
    "WallClock",
    "errors",
    "from_record",
    "summary",
    "to_record",
    "total",
]
