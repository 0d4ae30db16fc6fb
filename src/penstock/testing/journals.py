"""Journals for tests of what reads them: random ones that keep the rules of a journal, and those in stores."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from penstock.core import (
    Dropped,
    Ended,
    Event,
    Measurement,
    Noted,
    Reported,
    Segment,
    SessionClosed,
    SessionOpened,
    Share,
    Source,
    Started,
    Submitted,
    Trial,
    TrialStatus,
)
from penstock.goal import Goal
from penstock.report.views import Folded
from penstock.store import open_store

SPACE: dict[str, Any] = {
    "domains": [
        ["lr", {"kind": "float", "low": 1e-4, "high": 1.0, "log": True}],
        ["width", {"kind": "int", "low": 1, "high": 64}],
        ["act", {"kind": "choice", "values": ["relu", "tanh"]}],
    ]
}


def journal(seed: int, trials: int = 20) -> list[Event]:
    """A random but lawful journal: two sessions, retries, drops, failures, shares, fused and spread trials."""
    draw = random.Random(seed)
    now = 1_700_000_000.0
    events: list[Event] = [SessionOpened(now, "host", 1)]
    done = 0
    for session in range(2):
        if session:
            now += 1000.0
            events.append(SessionOpened(now, "host", 2))
        for trial in range(done, done + trials // 2):
            config: dict[str, Any] = {"lr": 10 ** draw.uniform(-4, 0), "width": draw.randint(1, 64)}
            config["act"] = draw.choice(["relu", "tanh"])
            if draw.random() < 0.5:
                config["momentum"] = draw.random()
            now += draw.random()
            last = draw.random() < 0.7
            events.append(
                Submitted(
                    now, 1, (Segment(Trial(trial, config, trial), until=9, last=last),), f"group {trial}"
                )
            )
            now += draw.random()
            shares = draw.choice(
                [
                    (Share("cuda:0", 1.0),),
                    (Share("cuda:1", 0.5),),
                    (Share("cuda:0", 1.0), Share("cuda:1", 1.0)),
                ]
            )
            fused = (trial, trial + 1000) if draw.random() < 0.2 else ()
            events.append(Started(now, trial, 0, shares, 0, fused))
            epochs = draw.randint(0, 9)
            for epoch in range(1, epochs + 1):
                now += draw.random()
                value = draw.gauss(0, 1) if draw.random() < 0.95 else math.inf
                energy = Measurement(draw.uniform(1, 50), "J", Source.ESTIMATED, 0.5)
                metrics = {"loss": value, "other": draw.random()}
                events.append(
                    Reported(
                        now,
                        trial,
                        epoch,
                        metrics,
                        draw.uniform(0.1, 2),
                        energy if draw.random() < 0.9 else None,
                    )
                )
                if draw.random() < 0.1:
                    events.append(events[-1])  # a message that came twice
            now += draw.random()
            end = draw.random()
            if end < 0.1:
                events.append(Ended(now, trial, TrialStatus.FAILED, epochs, "boom <b>", "Traceback <script>"))
            elif end < 0.2:
                events.append(Ended(now, trial, TrialStatus.FAILED, epochs, "again", "Trace", retry=True))
                events.append(Started(now + 0.5, trial, 0, shares, 1, fused))
                now += 1.0
                events.append(Ended(now, trial, TrialStatus.COMPLETED, epochs))
            elif last:
                events.append(Ended(now, trial, TrialStatus.COMPLETED, epochs))
            else:
                events.append(Ended(now, trial, TrialStatus.PAUSED, epochs))
                if draw.random() < 0.6:
                    now += draw.random()
                    events.append(Dropped(now, trial, "not promoted"))
        done += trials // 2
        events.append(Noted(now, "power_limits", {"text": "no GPU"}))
    if draw.random() < 0.5:
        events.append(SessionClosed(now + 1, "finished"))
    return events


def events_in(store: str | Path) -> list[Event]:
    """The journal of the newest study in a store."""
    with open_store(store, write=False) as opened:
        return [event for _, event in opened.read(opened.find().id)]


def folded_of(events: list[Event], **spec: Any) -> Folded:
    """The journal folded, as a study that minimises its loss."""
    goal = Goal.of("loss", None)
    return Folded.of("random", goal, events, {"space": SPACE, "goal": goal.to_json(), **spec})
