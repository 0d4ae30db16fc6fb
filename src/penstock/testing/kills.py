"""A storm of kill -9: small studies whose workers and drivers are killed at random, and the books checked after.

``python -m penstock.testing.kills FOLDER --kills 50 --seed 1`` prints the tally as JSON. Each study keeps two books.
One is its journal. The other the trainings write themselves, one appended line per start and per epoch, and Penstock
never reads it. At the end both must tell of the same epochs, and the journal must hold what an undisturbed run of
the same study holds. With ``--stub FILE`` the studies set power limits of the NVML stub's GPUs, and every kill of a
driver, and every end, must leave the limits as they were found.

The program imports Penstock once and forks every driver, so that a kill costs milliseconds, not a start of Python.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from penstock.core import Reported, StudyState
from penstock.core.errors import InvalidInput, PenstockError, StoreError

KINDS = ("full", "halving", "hyperband")
GIVE_UP_S = 120.0
"""Silence of a driver after which it counts as hanging."""
GONE_S = 60.0
"""Time in which a killed driver's workers must be gone, and its power limits be restored."""
_WORKER_KILLS_PER_TRIAL = 2  # a trial whose worker dies more than three times is given up, and rightly


@dataclass(frozen=True, slots=True)
class Case:
    """One study of the storm; everything follows from these values.

    Attributes:
        kind: Its scheduler.
        seed: Of the study.
        slots: Workers.
        pause_s: What an epoch takes.
        saves: Whether trials keep a checkpoint after each epoch; otherwise a killed one begins anew.
        gpus: Whether it sets power limits of GPUs.
    """

    kind: str
    seed: int
    slots: int
    pause_s: float
    saves: bool
    gpus: bool = False


@dataclass(slots=True)
class Tally:
    """What a storm did and found. All fields from ``lost`` on must be 0.

    Attributes:
        studies: Studies that ran to their end and were checked.
        driver_kills: Of which the study was resumed.
        worker_kills: Of which the driver went on by itself.
        trials: In the checked studies.
        epochs: In the checked studies.
        again: Epochs that were in flight at a kill, or not saved, and ran again.
        limited: Kills at whose moment a power limit was changed.
        lost: Trials or epochs that are in one book and not in the other, or in the undisturbed run alone.
        doubled: Epochs that ran again though the journal had them, and starts of a trial that still ran elsewhere.
        different: Trials whose configuration, status, epochs or metrics are not those of the undisturbed run.
        orphans: Workers that outlived their driver.
        limits: Times that a power limit was not restored.
        errors: Drivers that ended with an error, or hung.
        said: What the first of these were.
    """

    studies: int = 0
    driver_kills: int = 0
    worker_kills: int = 0
    trials: int = 0
    epochs: int = 0
    again: int = 0
    limited: int = 0
    lost: int = 0
    doubled: int = 0
    different: int = 0
    orphans: int = 0
    limits: int = 0
    errors: int = 0
    said: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """Of both kinds."""
        return self.driver_kills + self.worker_kills

    @property
    def wrong(self) -> int:
        """How many things went wrong."""
        return self.lost + self.doubled + self.different + self.orphans + self.limits + self.errors

    def add(self, other: Tally) -> None:
        """Count another tally in."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        del self.said[20:]


# --- the studies ----------------------------------------------------------------------------------------------------


def make_train(log: str, pause_s: float, saves: bool, gpus: bool) -> Callable[[Any], None]:
    """A training function that keeps a book of its own."""

    def train(run: Any) -> None:
        import os
        import time

        book = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

        def note(what: str, epoch: int) -> None:
            os.write(book, b"%s %d %d %d\n" % (what.encode(), run.trial, epoch, os.getpid()))

        state = run.load() or {"sum": 0.0, "seen": 0}
        note("begin", state["seen"])
        for epoch in run.epochs(4):
            state["sum"] += run.config["x"] * (epoch + 1) ** 0.5
            state["seen"] += 1
            for _ in range(20 if gpus else 1):
                time.sleep(pause_s)
                if gpus:
                    run.iteration(32)
            note("epoch", epoch + 1)
            if saves:
                run.save(state)
            run.report(loss=state["sum"], seen=state["seen"])
        os.close(book)

    return train


def make_study(case: Case, store: Path, log: Path, *, undisturbed: bool = False) -> Any:
    """The study of a case; undisturbed, it runs in this process, on a simulated device per slot."""
    from penstock.energy import LeastEnergy, PowerLimits
    from penstock.execute import Local, Simulated
    from penstock.sample import Random
    from penstock.schedule import Full, Halving, Hyperband
    from penstock.space import Choice, Float
    from penstock.study import Study

    schedulers: dict[str, Callable[[], Any]] = {
        "full": lambda: Full(trials=12),
        "halving": lambda: Halving(max_epochs=9, trials=9),
        "hyperband": lambda: Hyperband(max_epochs=9),
    }
    options: dict[str, Any] = {}
    if case.gpus and not undisturbed:
        options = {"power_limits": PowerLimits(LeastEnergy(), slice_s=0.02, step_w=50.0)}
    executor: Any = Local() if case.gpus else Local(slots=case.slots)
    pause_s, gpus = (0.0, False) if undisturbed else (case.pause_s, case.gpus)
    return Study(
        make_train(str(log), pause_s, case.saves, gpus),
        {"x": Float(0, 1), "batch_size": Choice(32)},
        minimize="loss",
        scheduler=schedulers[case.kind](),
        sampler=Random(),
        executor=Simulated(devices=case.slots) if undisturbed else executor,
        store=store,
        seed=case.seed,
        name="storm",
        keep="all",
        meter=case.gpus or undisturbed,
        **options,
    )


def resume_or_make(case: Case, store: Path, log: Path) -> Any:
    """The study as it is in the store, or a new one where the last driver died before it was."""
    from penstock.study import Study

    try:
        return Study.load(store)
    except (StoreError, InvalidInput):
        return make_study(case, store, log)


# --- books ----------------------------------------------------------------------------------------------------------


def read_journal(store: Path) -> tuple[StudyState, list[Reported]]:
    """The state, and all reports with repeated ones."""
    from penstock.store import open_store

    with open_store(store, write=False) as opened:
        events = [event for _, event in opened.read(opened.find("storm").id)]
    return StudyState.of(events), [event for event in events if isinstance(event, Reported)]


def read_log(path: Path) -> list[tuple[str, int, int, int]]:
    """What, trial, epoch and process of each line."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [(what, int(trial), int(epoch), int(pid)) for what, trial, epoch, pid in map(str.split, lines)]


def outcome(state: StudyState) -> dict[int, Any]:
    """What must not depend on kills."""
    return {
        record.id: (dict(record.config), record.status.value, record.epoch, dict(record.metrics))
        for record in state.trials.values()
    }


def check(case: Case, store: Path, log: Path, expected: StudyState, seen: Sequence[tuple[int, int]]) -> Tally:
    """Compare the books of a study that has ended.

    Args:
        case: The study.
        store: Its journal.
        log: Its other book.
        expected: The undisturbed run.
        seen: Before each kill, how many records the journal had, and then how many lines the other book.
    """
    from penstock.store import open_store

    state, _ = read_journal(store)
    state.validate()
    lines = read_log(log)
    tally = Tally(studies=1, trials=len(state.trials), epochs=state.epochs)
    journalled = {(record.id, report.epoch) for record in state.trials.values() for report in record.reports}
    ran = Counter((trial, epoch) for what, trial, epoch, _ in lines if what == "epoch")
    tally.again = sum(ran.values()) - len(ran)
    missing = journalled ^ ran.keys()
    mine, theirs = outcome(state), outcome(expected)
    tally.lost = len(missing) + len(theirs.keys() - mine.keys())
    wrong = [trial for trial in mine if mine[trial] != theirs.get(trial)]
    tally.different = len(wrong)
    if state.closed is None or state.closed.reason != "finished":
        tally.lost += 1
    if case.saves:  # what the journal had before a kill was never run again
        with open_store(store, write=False) as opened:
            numbered = list(opened.read(opened.find("storm").id))
        for records, line in seen:
            had = {(e.trial, e.epoch) for n, e in numbered if n <= records and isinstance(e, Reported)}
            tally.doubled += len(
                had & {(trial, epoch) for what, trial, epoch, _ in lines[line:] if what == "epoch"}
            )
    where: dict[int, int] = {}
    for what, trial, _, pid in lines:
        if what == "begin":
            where[trial] = pid
        elif where.get(trial) != pid:  # another process has begun it since, and this one still trains it
            tally.doubled += 1
    if tally.wrong:
        begun = Counter(trial for what, trial, _, _ in lines if what == "begin")
        first = {t: (mine[t], state.trials[t].reason, begun[t], theirs.get(t)) for t in wrong[:2]}
        tally.said.append(f"{case}: books differ in {sorted(missing)[:5]}, outcomes in {first}, {tally}")
    return tally


# --- the storm ------------------------------------------------------------------------------------------------------


class Storm:
    """Runs studies one after another and kills; one thread, forks its drivers.

    Args:
        folder: Where stores and books go; a study's are removed once it is checked and found right.
        seed: Everything but the timing follows from it.
        limits_w: Reads the power limits of all GPUs, where there are some.
    """

    def __init__(self, folder: Path, seed: int, limits_w: Callable[[], list[float]] | None = None) -> None:
        self.folder = folder
        self.tally = Tally()
        self._rng = random.Random(seed)
        self._limits_w = limits_w
        self._found_w = limits_w() if limits_w else []

    def run(self, kills: int) -> Tally:
        """Go on until there were so many kills and the last study has ended."""
        number = 0
        while self.tally.kills < kills and self.tally.wrong < 5:
            gpus = self._limits_w is not None
            case = Case(
                kind=self._rng.choice(KINDS[:2] if gpus else KINDS),
                seed=self._rng.randrange(1 << 30),
                slots=2 if gpus else self._rng.choice((1, 2, 3)),
                pause_s=0.002 if gpus else self._rng.choice((0.001, 0.004, 0.01)),
                saves=gpus or self._rng.random() < 0.75,
                gpus=gpus,
            )
            most = min(kills - self.tally.kills, self._rng.randint(4, 16))
            self.tally.add(self._study(case, self.folder / f"study-{number}", most))
            number += 1
        return self.tally

    def _study(self, case: Case, folder: Path, most: int) -> Tally:
        folder.mkdir()
        store, log = folder / "s.db", folder / "book"
        expected = self._undisturbed(case, folder)
        tally, seen = Tally(), list[tuple[int, int]]()
        victims: Counter[int] = Counter()
        while True:  # a driver's life
            driver = self._fork(lambda: resume_or_make(case, store, log).run(), folder / "driver.log")
            try:
                over = self._torment(driver, store, log, tally, most, seen, victims)
            finally:
                if not _over(driver):
                    os.kill(driver, signal.SIGKILL)
                status = os.waitstatus_to_exitcode(os.waitpid(driver, 0)[1])
            tally.orphans += self._orphans(log)
            self._check_limits(tally, f"{case} after {'the end' if over else 'a kill'}")
            if not over:
                continue
            if status:
                tally.errors += 1
                tally.said.append(
                    f"{case}: a driver ended with {status}: {(folder / 'driver.log').read_text()[-1500:]}"
                )
                return tally
            break
        tally.add(check(case, store, log, expected, seen))
        if not tally.wrong:
            import shutil

            shutil.rmtree(folder)
        return tally

    def _undisturbed(self, case: Case, folder: Path) -> StudyState:
        store, log = folder / "undisturbed.db", folder / "undisturbed"
        child = self._fork(
            lambda: make_study(case, store, log, undisturbed=True).run(), folder / "undisturbed.log"
        )
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise RuntimeError((folder / "undisturbed.log").read_text())
        return read_journal(store)[0]

    def _torment(
        self,
        driver: int,
        store: Path,
        log: Path,
        tally: Tally,
        most: int,
        seen: list[tuple[int, int]],
        victims: Counter[int],
    ) -> bool:
        """Kill workers until the driver itself is killed (False) or is over (True)."""
        rng = self._rng
        begun = len(read_log(log))
        if rng.random() < 0.8:  # it is at work; otherwise it may just be starting, or making the store
            for _ in _patiently(driver):
                if len(read_log(log)) > begun:
                    break
        while True:
            until_s = time.monotonic() + rng.expovariate(1 / 0.04)
            while time.monotonic() < until_s and not _over(driver):
                time.sleep(0.001)
            if tally.kills >= most:
                for _ in _patiently(driver, lambda: len(read_log(log))):
                    pass
            worker = None
            if rng.random() < 0.7:
                for _ in _patiently(driver, lambda: len(read_log(log))):
                    worker = self._worker(driver, log, victims, begun)
                    if worker is not None:
                        break
            if _over(driver):
                return True
            if worker is not None and _worn(store):
                continue
            before = _records(store), len(read_log(log))
            limited = self._limits_w is not None and self._limits_w() != self._found_w
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker or driver, signal.SIGKILL)
                seen.append(before)
                tally.limited += limited
                if worker is None:
                    tally.driver_kills += 1
                    return False
                tally.worker_kills += 1
                self._count(worker, log, victims)

    @staticmethod
    def _count(pid: int, log: Path, victims: Counter[int]) -> None:
        """Who was hit: between a look at the book and a kill a worker may have gone on to another trial."""
        trials = [trial for _, trial, _, each in read_log(log) if each == pid]
        victims[trials[-1]] += 1

    def _worker(self, driver: int, log: Path, victims: Counter[int], begun: int) -> int | None:
        """A process that trains a trial now and may be killed."""
        latest = {pid: trial for _, trial, _, pid in read_log(log)[begun:]}
        able = [(pid, trial) for pid, trial in latest.items() if victims[trial] < _WORKER_KILLS_PER_TRIAL]
        able = [(pid, trial) for pid, trial in able if _descends(pid, driver)]
        if not able:
            return None
        return self._rng.choice(able)[0]

    def _orphans(self, log: Path) -> int:
        pids = {pid for _, _, _, pid in read_log(log)}
        deadline_s = time.monotonic() + GONE_S
        while pids and time.monotonic() < deadline_s:
            pids = {pid for pid in pids if _alive(pid)}
            if pids:
                time.sleep(0.005)
        return len(pids)

    def _check_limits(self, tally: Tally, when: str) -> None:
        if self._limits_w is None:
            return
        deadline_s = time.monotonic() + GONE_S
        while self._limits_w() != self._found_w and time.monotonic() < deadline_s:
            time.sleep(0.01)
        if self._limits_w() != self._found_w:
            tally.limits += 1
            tally.said.append(f"{when}: limits are {self._limits_w()}, were {self._found_w}")

    @staticmethod
    def _fork(do: Callable[[], Any], log: Path) -> int:
        """A driver: a fork of this process, its output in a file."""
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            for fd in (1, 2):
                os.dup2(out, fd)
            do()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stderr.flush()
            os._exit(status)


def _worn(store: Path) -> bool:
    """Whether a trial may be near to being given up: by the journal, for the book lacks those hit before they wrote."""
    state, _ = read_journal(store)
    return any(r.attempts >= _WORKER_KILLS_PER_TRIAL for r in state.trials.values() if not r.status.is_end)


def _patiently(driver: int, progress: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """Turns of waiting until the driver is over; an error where it makes no progress for long."""
    last, since_s = progress(), time.monotonic()
    while not _over(driver):
        time.sleep(0.002)
        now = progress()
        if now != last:
            last, since_s = now, time.monotonic()
        if time.monotonic() - since_s > GIVE_UP_S:
            raise TimeoutError(f"The driver {driver} has done nothing for {GIVE_UP_S:.0f} s.")
        yield


def _over(pid: int) -> bool:
    """Whether a child has ended; it is left to be reaped."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _alive(pid: int) -> bool:
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def _descends(pid: int, ancestor: int) -> bool:
    """Whether a living process comes from another."""
    if not _alive(pid):
        return False
    while pid > 1:
        if pid == ancestor:
            return True
        stat = _stat(pid)
        if stat is None:
            return False
        pid = int(stat[1])
    return False


def _records(store: Path) -> int:
    """How many records the journal has; 0 where there is none yet."""
    from penstock.store import open_store

    try:
        with open_store(store, write=False) as opened:
            return opened.find("storm").events
    except PenstockError:
        return 0


def _load_stub(path: Path) -> Any:
    """The Python side of the NVML stub."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("nvml_stub", path)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nvml_stub"] = module
    spec.loader.exec_module(module)
    return module


def storm(folder: Path, *, kills: int, seed: int, stub: Path | None = None) -> Tally:
    """Run a storm in a process of its own.

    Args:
        folder: An empty one.
        kills: How many.
        seed: Of everything but the timing.
        stub: ``nvml_stub.py`` of the tests: the studies run on two fake GPUs and change their power limits.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", __name__, str(folder), f"--kills={kills}", f"--seed={seed}"]
    if stub is not None:
        module = _load_stub(stub)
        library = module.build(folder)
        gpus = module.NvmlStub(folder / "gpus", 2)
        gpus.set_load(240.0)
        gpus.change(limit_w=230.0)  # what the administrator chose
        gpus.write_smi(folder)
        environment |= gpus.environment(library)
        environment["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        command += ["--stub", str(stub)]
    environment["XDG_RUNTIME_DIR"] = str(folder)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise RuntimeError(f"The storm broke off with {done.returncode}:\n{done.stderr[-3000:]}")
    return Tally(**json.loads(done.stdout.splitlines()[-1]))


def _import_all() -> None:
    """What every driver would import for itself."""
    import importlib

    for name in ("penstock.study", "penstock.store._sql", "penstock.store._sqlite", "cloudpickle"):
        importlib.import_module(name)
    importlib.import_module("sqlalchemy.dialects.sqlite")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a storm and print its tally."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stub", type=Path, help="the tests' nvml_stub.py; PENSTOCK_NVML_STUB names its state"
    )
    given = parser.parse_args(argv)
    _import_all()
    os.environ["PENSTOCK_NURSERY"] = "1"
    limits_w = None
    if given.stub is not None:
        gpus = _load_stub(given.stub).NvmlStub.attach(Path(os.environ["PENSTOCK_NVML_STUB"]))

        def limits_w() -> list[float]:
            return [gpus.limit_w(index) for index in range(gpus.state.count)]

    tally = Storm(given.folder, given.seed, limits_w).run(given.kills)
    print(json.dumps(asdict(tally)), flush=True)  # noqa: T201
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
