"""The Fluid planner: what waits is packed or spread by how long it takes, and widths follow as trials end."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from penstock.core import Placement, Plan, PlanPass, Share, Turn
from penstock.core.errors import InvalidInput
from penstock.plan._board import EPSILON, Board, fits_alone
from penstock.plan._elastic import Idle, elastic
from penstock.plan._finalists import finalists, widen
from penstock.plan._outlook import Outlook, Runtime
from penstock.plan._pack import Allotment, forecast_s, makespan_s
from penstock.plan._relay import relay, take_turns, turns_of
from penstock.plan._rollout import epoch_count
from penstock.plan._rollout import makespan_s as rollout_s
from penstock.plan._rows import row_widths
from penstock.plan._waves import three_waves
from penstock.plan._wrap import wrap
from penstock.predict import Overhead

Widths: TypeAlias = Literal["lookahead", "waterfill"]
"""How wide waiting trials become: by a look ahead at several choices, or by StaticFluid as in the paper."""


# Courses that a group may take. "waterfill" is the paper's: StaticFluid's widths, DynamicFluid's changes. In all others
# idle devices go to the trial that would end last, and widths are StaticFluid's ("longest"), those of a horizon (times
# the least one), at first those with which all run at once ("shelf"), one device each ("one"), one for
# some and as many for the others ("1+3"), those of trials in a row on the same devices ("rows"), or those of trials
# that begin wide and hand devices over to others at the end of an epoch ("relay").
_FACTORS = {"x1": 1.0, "x1.07": 1.07, "x1.15": 1.15, "x1.3": 1.3, "x1.6": 1.6}
_MIXES = {"1+2": 2, "1+3": 3, "1+4": 4, "1+6": 6}
# Those after which idle devices are given by when a trial would really end, the rest of its epoch included.
_BY_EPOCHS = {f"{rule}, by epochs": rule for rule in ("longest", "shelf", *_FACTORS)}
_COURSES = ("waterfill", "longest", "shelf", "one", "rows", "relay", *_FACTORS, *_BY_EPOCHS, *_MIXES)
# To play a course through takes about trials * (trials + devices) microseconds. All that is played through may take:
_PLAYS = 200_000  # when a group begins,
_PLAYS_LATER = 20_000  # once one that was too large is under way,
_PLAYS_AGAIN = 4000  # and to see, of runtimes not well known, whether a course is still the best;
_SHARE = 2000  # but no more than 0.2% of the time into which the group fits, in microseconds per second.
_WARY = 2.0  # times the error of guesses: what other courses than one device each must promise
_LOOKAHEAD = ((64, 8), (256, 4), (1 << 60, 1))  # up to so many waiting trials, so many choices are compared
_GROUP = 4  # and at least so many when a group meets idle devices
_PLAYED = 512  # a group of up to so many is played through on idle devices; otherwise the end is estimated
_GAIN = 0.93  # other widths than StaticFluid's must promise an end so much earlier: forecasts err
_SLACK = 1.15  # without a comparison: the least horizon can rarely be met
_LATER = 1.07  # of the least horizon, for those who come to others that run
_ROWS = 3  # trials per device up to which rows of them on the same devices are played early
_TURNS = 24  # how often turns are dealt out when a group begins, within half of what all others may take
_SURE = 0.02  # how far off runtimes may be of which turns are made
_RISK = 1.0  # times the error of guesses: how much sooner a group must end by pauses
_ROUGH = 1.05  # of what is aimed at: so late an end of pauses is worth to be played through
_TURN = 25  # microseconds for each trial and time
_WAVES = 10_000  # microseconds to look for three waves: at most half of the share of a group's time
_TRIED = 16  # devices looked at for one trial: replanning stays cheap however many are half full


def fluid(
    *,
    c: int = 1,
    d: int = 1,
    alpha: float = 1.0,
    beta: float = 1.0,
    epsilon_s: float = 0.0,
    runtime: Runtime | None = None,
    idle: Idle = "longest",
    widths: Widths = "lookahead",
) -> tuple[PlanPass, ...]:
    """The passes of a planner that shares devices among short trials and spreads long ones (Fluid).

    Args:
        c: The most trials on one device. Lowered to where ``alpha`` says one more still pays.
        d: The most devices of one trial. Lowered to where ``beta`` says one more still pays.
        alpha: Packing overhead: with p trials on a device each takes ``alpha ** (p - 1)`` times as long.
        beta: Scaling overhead: on w devices a trial takes ``beta ** (w - 1) / w`` of its time.
        epsilon_s: What a change of width costs a running trial, in seconds.
        runtime: The expected seconds of a placement alone on one device, or None if not known; by default
            ``Placement.expected_s``.
        idle: Who gets devices that nothing waits for: the trial that would end last, the best one, or all evenly.
        widths: How wide waiting trials become: ``"lookahead"`` plays several courses of a group that comes alone
            through, the paper's among them, and follows the one that ends first: with known runtimes never later than
            the paper's. That takes up to 0.3% of the time into which the group fits, and about 0.4 s at most; larger
            groups only compare widths (trials of a stream get the width of the least device time).
            ``"waterfill"`` is StaticFluid throughout.

    Returns:
        Two passes: one places what waits, one changes what runs.
    """
    overhead = Overhead(alpha, beta, c, d, epsilon_s).within_bounds()
    if idle not in ("longest", "waterfill", "best", "even"):
        raise InvalidInput(f'idle is {idle!r}; give "longest", "waterfill", "best" or "even".')
    if widths not in ("lookahead", "waterfill"):
        raise InvalidInput(f'widths is {widths!r}; give "lookahead" or "waterfill".')
    allotment = Allotment(overhead)
    grow = elastic(overhead, runtime=runtime, idle=idle, lead=widths == "lookahead")

    def place(plan: Plan) -> Plan:
        return _place(plan, allotment, runtime, widths) if plan.waiting and plan.free else plan

    if widths != "lookahead" or idle != "longest":
        return place, grow
    courses = {name: _follow(allotment, name, runtime=None) for name in _COURSES}
    followed = courses if runtime is None else {n: _follow(allotment, n, runtime=runtime) for n in _COURSES}

    def decide(plan: Plan) -> Plan:
        if not plan.waiting or not plan.free:
            return plan
        name = _course(plan)
        turns: tuple[Turn, ...] = ()
        if name != "relay" and (not name or any(placement.expected_error for placement in plan.waiting)):
            count = len(plan.waiting) + len(plan.running)
            if 2 * count * count <= _PLAYS:  # otherwise not even a look at runtimes is worth it
                name, turns = _choose(plan, Outlook(plan, runtime), courses, allotment, name)
        if not name:
            return place(plan)
        if name == "relay" and not turns_of(plan):
            plan = _with_turns(plan, turns)
        after = followed[name][0](plan)
        old = len(plan.placed)
        placed = [replace(placement, course=name) for placement in after.placed[old:]]
        return replace(after, placed=(*after.placed[:old], *placed))

    def change(plan: Plan) -> Plan:
        name = _course(plan)
        return followed[name][1](plan) if name else grow(plan)

    return decide, change


def _follow(allotment: Allotment, name: str, *, runtime: Runtime | None) -> tuple[PlanPass, PlanPass]:
    """The passes of a course."""
    rule = _BY_EPOCHS.get(name, name)

    def place(plan: Plan) -> Plan:
        if not plan.waiting or not plan.free:
            return plan
        return (
            take_turns(plan, turns_of(plan), allotment.overhead)
            if rule == "relay"
            else _place(plan, allotment, runtime, rule)
        )

    idle: Idle = "waterfill" if rule == "waterfill" else "longest"
    by_epochs = name in _BY_EPOCHS or name in _MIXES or name in ("rows", "relay")
    change = elastic(allotment.overhead, runtime=runtime, idle=idle, by_epochs=by_epochs)
    if rule not in ("rows", "relay"):
        return place, change

    def grow(plan: Plan) -> Plan:
        # Who waits has a row, or a turn, and so has who is going to pause.
        comes = plan.waiting or any(not item.placement.shares for item in plan.running)
        return plan if comes else change(plan)

    return place, grow


def _course(plan: Plan) -> str:
    """What was decided for the one group that is under way; "": nothing, or there are several."""
    name = ""
    since_s = None
    for item in plan.running:
        placement = item.placement
        if placement.since_s != since_s:
            if since_s is not None:
                return ""
            since_s = placement.since_s
        name = placement.course or name
    for placement in (*plan.placed, *plan.waiting):
        if placement.since_s != since_s:
            if since_s is not None:
                return ""
            since_s = placement.since_s
        name = placement.course or name
    return name if name in _COURSES else ""


def _choose(
    plan: Plan,
    outlook: Outlook,
    courses: Mapping[str, tuple[PlanPass, PlanPass]],
    allotment: Allotment,
    before: str = "",
) -> tuple[str, tuple[Turn, ...]]:
    """The course that ends a group first, each played through; ``before`` if that would take too long."""
    if outlook.guessed or outlook.is_stream(plan) or any(item.backlog for item in plan.free):
        return before, ()
    overhead, devices = allotment.overhead, outlook.devices(plan)
    count = len(plan.waiting) + len(plan.running)
    least_s = outlook.horizon_s(allotment, devices)
    budget = min(_PLAYS_AGAIN if before else _PLAYS_LATER if plan.running else _PLAYS, _SHARE * least_s)
    play = count * (count + devices)
    if budget < 2 * play:
        return before, ()
    work_s = [*outlook.waiting_s, *outlook.running_s]
    goal_s = allotment.fastest_s(max(work_s), devices)
    names = _ordered(work_s, least_s, allotment, devices, before)
    within_s = math.inf  # what others than the first must promise
    off = sum(item.expected_error for item in plan.waiting) / len(plan.waiting)
    if (
        off
        and not plan.running
        and len(plan.waiting) <= sum(item.fraction >= 1 - EPSILON for item in plan.free)
    ):
        # One each is what there is without Fluid, and elastic makes good for wrong guesses. To give the short less
        # and the long more from the start must promise more than the guesses may be off.
        names.insert(0, "one")
        budget += play
        within_s = max(0.0, 1 - _WARY * off) * max(work_s)
    best, best_s = "", math.inf
    extra = budget / 2  # for turns, so that no other course is left out for them
    for name in names:
        if budget < play:
            break
        budget -= play
        ends_s = rollout_s(
            plan,
            courses[name],
            overhead=overhead,
            waiting_s=outlook.waiting_s,
            running_s=outlook.running_s,
            within_s=min(best_s, within_s) if best else math.inf,
        )
        if not best:
            best, best_s = name, ends_s
            if before:  # to leave a course is like a change of widths
                within_s = ends_s - overhead.epsilon_s
        elif ends_s < min(best_s * (1 - 1e-9), within_s):
            best, best_s = name, ends_s
        if best_s <= goal_s * (1 + 1e-6):
            return best, ()
    if best and not before:
        best_s = min(best_s, within_s)
        turns: tuple[Turn, ...] = ()
        if _takes_turns(plan, overhead, devices):
            best_s, turns = _turns(plan, outlook, courses, overhead, devices, extra, best_s)
        if _may_pause(plan):
            turns = _pauses(plan, outlook, courses, overhead, devices, best_s * (1 - _RISK * off)) or turns
        if turns:
            return "relay", turns
    return best or before, ()


def _turns(
    plan: Plan,
    outlook: Outlook,
    courses: Mapping[str, tuple[PlanPass, PlanPass]],
    overhead: Overhead,
    devices: int,
    budget: float,
    within_s: float,
) -> tuple[float, tuple[Turn, ...]]:
    """Turns that end a group first and sooner than this, on whole devices or with parts of some; the latter are played
    through, as no one knows beforehand who exactly will share a device. And that end; without turns, ``within_s``."""
    count = len(plan.waiting)
    epochs = [epoch_count(item) for item in plan.waiting]
    trials = [item.segments[0].trial.id for item in plan.waiting]
    models = [overhead, replace(overhead, max_sharing=1)] if overhead.max_sharing > 1 else [overhead]
    plays = (len(models) - 1) * count * (count + devices)
    tries = min(_TURNS, int((budget - plays) / _TURN / count)) // len(models)
    best: tuple[Turn, ...] = ()
    for model in models:
        ends_s, found = relay(
            outlook.waiting_s, epochs, devices=devices, overhead=model, within_s=within_s, tries=tries
        )
        if not found:
            continue
        turns = tuple(replace(turn, trial=trials[turn.trial]) for turn in found)
        if model.max_sharing > 1:
            ends_s = _played_s(plan, turns, outlook, courses, overhead, within_s)
        if ends_s < within_s:
            within_s, best = ends_s, turns
    return within_s, best


def _pauses(
    plan: Plan,
    outlook: Outlook,
    courses: Mapping[str, tuple[PlanPass, PlanPass]],
    overhead: Overhead,
    devices: int,
    within_s: float,
) -> tuple[Turn, ...]:
    """Turns of trials that pause, if a group so ends sooner than this; played through, as devices that fall idle near
    the end are given to others."""
    epochs = [epoch_count(item) for item in plan.waiting]
    begun = [item.segments[0] for item in plan.waiting]
    work_s = outlook.waiting_s
    _, found = wrap(work_s, epochs, devices=devices, overhead=overhead, within_s=_ROUGH * within_s)
    # Of turns in rows where nobody pauses, other courses do as well.
    ways = [found] if any(turn.start for turn in found) else []
    if _SHARE * within_s >= 2 * _WAVES and _takes_turns(plan, overhead, devices):
        _, found = three_waves(work_s, epochs, devices=devices, overhead=overhead, within_s=within_s)
        ways += [found] if found else []
    best: tuple[Turn, ...] = ()
    for found in ways:
        turns = tuple(
            replace(
                turn,
                trial=begun[turn.trial].trial.id,
                start=begun[turn.trial].start + turn.start if turn.start else 0,
            )
            for turn in found
        )
        ends_s = _played_s(plan, turns, outlook, courses, overhead, within_s)
        if ends_s < within_s:
            within_s, best = ends_s, turns
    return best


def _played_s(
    plan: Plan,
    turns: tuple[Turn, ...],
    outlook: Outlook,
    courses: Mapping[str, tuple[PlanPass, PlanPass]],
    overhead: Overhead,
    within_s: float,
) -> float:
    """When a group that takes these turns has ended; infinite if that is later than ``within_s``."""
    return rollout_s(
        _with_turns(plan, turns),
        courses["relay"],
        overhead=overhead,
        waiting_s=outlook.waiting_s,
        running_s=(),
        within_s=within_s,
    )


def _may_pause(plan: Plan) -> bool:
    """Whether trials can be told beforehand to pause: all of a group, on devices that are idle and alike."""
    return not plan.running and _alike(plan) and all(item.pausable for item in plan.waiting)


def _alike(plan: Plan) -> bool:
    """Whether devices are idle, of one kind, and have the memory for any trial alone; and nobody has to be alone."""
    free = plan.free
    if any(item.fraction < 1 - EPSILON for item in free) or len({item.device.kind for item in free}) > 1:
        return False
    return all(
        not item.exclusive
        and (item.memory_bytes is None or all(fits_alone(each.device, item.memory_bytes) for each in free))
        for item in plan.waiting
    )


def _takes_turns(plan: Plan, overhead: Overhead, devices: int) -> bool:
    """Whether turns can be fixed beforehand: for trials that can spread, have a device each or gain nothing by
    sharing one, whose runtimes are sure, on devices that are all idle and alike to each of them."""
    waiting = plan.waiting
    if plan.running or overhead.max_devices == 1 or (overhead.max_sharing > 1 and len(waiting) > devices):
        return False
    if not _alike(plan):
        return False
    # With several in a row, each begins late by what those before it were off.
    sure = _SURE if len(waiting) <= devices else _SURE / 2
    return all(
        item.expected_error <= sure  # who keeps to turns can't make good for wrong guesses
        and item.max_devices >= overhead.max_devices
        for item in waiting
    )


def _with_turns(plan: Plan, turns: tuple[Turn, ...]) -> Plan:
    return replace(plan, waiting=tuple(replace(placement, turns=turns) for placement in plan.waiting))


def _ordered(
    work_s: Sequence[float], least_s: float, allotment: Allotment, devices: int, before: str
) -> list[str]:
    """The course so far, the paper's, then the others: horizons in the order in which constant widths would end."""
    ends_s: dict[str, float] = {}
    for name, factor in _FACTORS.items():
        widths = [min(float(devices), allotment.width(each_s, factor * least_s)) for each_s in work_s]
        ends_s[name] = makespan_s(work_s, widths, devices=devices, overhead=allotment.overhead)
    first, second, *others = sorted(_FACTORS, key=ends_s.__getitem__)
    found = ["waterfill", first, second, "longest", "shelf", *others]
    # Long rows end together in any order; with short ones it matters who is in which.
    found.insert(5 if len(work_s) <= _ROWS * devices else len(found), "rows")
    found += [f"{name}, by epochs" for name in (first, "shelf", second, "longest", *others)]
    found += _MIXES
    return [before, *(name for name in found if name != before)] if before else found


def _place(plan: Plan, allotment: Allotment, runtime: Runtime | None, rule: str) -> Plan:
    outlook = Outlook(plan, runtime)
    waiting, waiting_s = plan.waiting, outlook.waiting_s
    devices = outlook.devices(plan)
    board = Board(plan)
    empty = sum(item.fraction >= 1 - EPSILON for item in plan.free)
    wanted, horizon_s = _widths(plan, outlook, allotment, devices, empty, rule)

    lead = finalists(plan, allotment.overhead) if rule == "lookahead" else {}

    def bears(placement: Placement, left_s: float) -> int:
        if placement.segments[0].trial.id in lead:
            return 1
        width = allotment.width(left_s, horizon_s)
        return 1 if width >= 1 else round(1 / width)

    board.settle(plan.running, outlook.running_s, bears)
    # The longest first; who came earlier has aged by as much, so that nobody is passed for ever. Of several groups
    # first those that were promoted: what they lead to waits for them, and nothing waits for new ones yet.
    keys = [item.since_s - left_s for item, left_s in zip(waiting, waiting_s, strict=True)]
    order = sorted(range(len(waiting)), key=keys.__getitem__)
    if rule == "lookahead" and outlook.is_stream(plan):
        order.sort(key=lambda index: not waiting[index].promoted)
    resized = widen(plan, outlook, board, lead, allotment.overhead)
    shared = board.shared()
    placed: list[Placement] = []
    done = bytearray(len(waiting))
    unplaced = len(order)
    for index in order:
        if not board.whole and not shared:
            break
        placement, left_s = waiting[index], waiting_s[index]
        width = wanted[index] if wanted else allotment.width(left_s, horizon_s)
        width = lead.get(placement.segments[0].trial.id, width)
        if not width:
            continue  # it follows another one in its row
        limit = 1 if placement.exclusive or width >= 1 else round(1 / width)
        shares: tuple[Share, ...] = ()
        if board.whole:
            most = max(1, min(round(width), placement.max_devices, board.whole))
            names = board.take_whole(most, placement.memory_bytes)
            # With room for everybody nobody shares; otherwise it leaves a part to somebody else.
            part = 1.0 if len(names) > 1 or limit == 1 or unplaced <= board.whole + len(names) else 1 / limit
            for name in names:
                tenancy = board.tenancies[name]
                tenancy.enter(part, left_s, limit, placement.memory_bytes)
                if tenancy.fraction > EPSILON:
                    heapq.heappush(shared, (tenancy.load_s, name))
            shares = tuple(Share(name, part) for name in names)
        if not shares and limit > 1:
            shares = _share(board, shared, placement, left_s, limit)
        elif not shares and shared:
            # It needs a device for itself: keep the one that is free soonest from being filled up again.
            heapq.heappop(shared)
        if shares:
            placed.append(replace(placement, shares=shares))
            done[index] = 1
        unplaced -= 1
    rest = [index for index in order if not done[index]]
    if rest:
        _queue_behind(board, waiting, rest, done, placed)
    left = tuple(item for item, gone in zip(waiting, done, strict=True) if not gone)
    return replace(
        plan,
        waiting=left,
        free=board.free(),
        placed=(*plan.placed, *placed),
        resized=(*plan.resized, *resized),
    )


def _widths(
    plan: Plan, outlook: Outlook, allotment: Allotment, devices: int, empty: int, rule: str
) -> tuple[list[float], float]:
    """A width for each waiting trial (none: by the horizon), and the horizon within which all should end."""
    waiting_s = outlook.waiting_s
    if rule == "lookahead" and outlook.is_stream(plan):
        # More work is on its way, so no end is in sight to hurry for: while trials wait for devices, the width that
        # takes the least device time is the best for all. When none waits, elastic spreads them.
        return [], math.inf
    least_s = outlook.horizon_s(allotment, devices)
    if rule in _FACTORS:
        return [], _FACTORS[rule] * least_s
    if rule == "shelf":
        shelf_s = None if plan.running or not empty else allotment.shelf_s(waiting_s, empty)
        return [], _SLACK * least_s if shelf_s is None else shelf_s
    if rule == "one":
        return [1.0] * len(waiting_s), least_s
    if rule in _MIXES:
        if plan.running:
            return [], _LATER * least_s
        return _mixed(waiting_s, min(_MIXES[rule], allotment.overhead.max_devices), empty), least_s
    if rule == "rows":
        return _rows(plan, outlook, allotment, devices, empty), _SLACK * least_s
    if rule in ("waterfill", "longest"):
        only = allotment.candidates(waiting_s, devices=devices, idle=empty, horizon_s=least_s, most=1)
        return next(only), least_s
    most = next(count for limit, count in _LOOKAHEAD if len(waiting_s) <= limit)
    if 2 * empty >= devices:
        most = max(most, _GROUP)
    if most == 1:
        return [], _SLACK * least_s
    exact = not plan.running and len(waiting_s) <= _PLAYED
    ready_s = [] if exact else outlook.ready_s(plan, allotment.overhead)
    best: list[float] = []
    best_s, gain = float("inf"), _GAIN
    if len(waiting_s) <= empty:
        # One each is what there is without Fluid, and elastic makes good for wrong guesses. To give the short less
        # and the long more from the start must promise more than the guesses may be off.
        best = [1.0] * len(waiting_s)
        best_s = max(waiting_s)
        off = sum(item.expected_error for item in plan.waiting) / len(plan.waiting)
        gain = min(gain, max(0.0, 1 - 2 * off))
    for widths in allotment.candidates(waiting_s, devices=devices, idle=empty, horizon_s=least_s, most=most):
        if exact:
            ends_s = makespan_s(waiting_s, widths, devices=devices, overhead=allotment.overhead)
        else:
            ends_s = forecast_s(widths, waiting_s, ready_s=ready_s, overhead=allotment.overhead)
        if ends_s < gain * best_s:  # StaticFluid's widths come first
            best, best_s = widths, ends_s
    return best, max(best_s, least_s)


def _mixed(waiting_s: Sequence[float], width: int, empty: int) -> list[float]:
    """One device each, and as many for the longest as room is left for."""
    more = max(0, empty - len(waiting_s)) // max(1, width - 1)
    widths = [1.0] * len(waiting_s)
    for index in heapq.nlargest(more, range(len(waiting_s)), key=waiting_s.__getitem__):
        widths[index] = float(width)
    return widths


def _rows(plan: Plan, outlook: Outlook, allotment: Allotment, devices: int, empty: int) -> list[float]:
    """Who begins on how many devices, 0 for those who follow others (none: by the horizon)."""
    speed = allotment.overhead.speed
    running = [
        (speed(float(len(item.placement.shares))), left_s)
        for item, left_s in zip(plan.running, outlook.running_s, strict=True)
        if item.placement.shares
    ]
    found = row_widths(outlook.waiting_s, running, free=empty, devices=devices, overhead=allotment.overhead)
    return [float(width) for width in found]


def _share(
    board: Board, shared: list[tuple[float, str]], placement: Placement, left_s: float, limit: int
) -> tuple[Share, ...]:
    """A part of the least loaded device that bears one more tenant, among the first few."""
    skipped: list[tuple[float, str]] = []
    shares: tuple[Share, ...] = ()
    while shared and len(skipped) < _TRIED:
        entry = heapq.heappop(shared)
        tenancy = board.tenancies[entry[1]]
        if tenancy.bears(1 / limit, limit, placement.memory_bytes):
            tenancy.enter(1 / limit, left_s, limit, placement.memory_bytes)
            shares = (Share(entry[1], 1 / limit),)
            if tenancy.fraction > EPSILON:
                heapq.heappush(shared, (tenancy.load_s, entry[1]))
            break
        if tenancy.count < tenancy.limit:  # for a shorter or smaller trial there may be room
            skipped.append(entry)
    for entry in skipped:
        heapq.heappush(shared, entry)
    return shares


def _queue_behind(
    board: Board,
    waiting: tuple[Placement, ...],
    rest: list[int],
    done: bytearray,
    placed: list[Placement],
) -> None:
    """Very short trials queue behind those that run, one per device and round, as far as executors offer it."""
    ring = [tenancy for tenancy in board.tenancies.values() if tenancy.backlog > 0]
    following = iter(index for index in rest if not waiting[index].exclusive)
    while ring:
        for tenancy in ring:
            index = next(following, None)
            if index is None:
                return
            tenancy.backlog -= 1
            placed.append(replace(waiting[index], shares=(Share(tenancy.device.id),)))
            done[index] = 1
        ring = [tenancy for tenancy in ring if tenancy.backlog > 0]
