"""What a training function sees, and what its checkpoints are worth after a crash."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import Measurement, Source
from penstock.core.errors import InvalidInput
from penstock.train._checkpoint import FileCheckpoints, Report
from penstock.train._run import Run, Unwind
from penstock.train._worker import End, Settings, Spec, execute


class Notes:
    """A sink that remembers, and stops the trial when ``stop_at`` epochs are reported."""

    def __init__(self, stop_at: int | None = None, keep: bool = False) -> None:
        self.reports: list[Report] = []
        self.paths: list[tuple[int, str]] = []
        self.stop_at = stop_at
        self.keep = keep

    def reported(self, report: Report) -> None:
        self.reports.append(report)

    def saved(self, epoch: int, path: str) -> None:
        self.paths.append((epoch, path))

    def told(self) -> tuple[str, bool] | None:
        if self.stop_at is not None and self.epochs and self.epochs[-1] >= self.stop_at:
            return "enough", self.keep
        return None

    @property
    def epochs(self) -> list[int]:
        return [report[0] for report in self.reports]

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [report[1] for report in self.reports]


def spec(**changes: Any) -> Spec:
    base: dict[str, Any] = {
        "trial": 0,
        "config": {"lr": 0.1},
        "seed": 7,
        "start": 0,
        "until": 3,
        "last": True,
        "copy_from": None,
        "checkpoint": None,
        "known": 0,
        "attempt": 0,
    }
    return Spec(**(base | changes))


def run(
    work: Any,
    files: Path,
    notes: Notes | None = None,
    objectives: tuple[str, ...] = ("loss",),
    **changes: Any,
) -> End:
    return execute(work, spec(**changes), Settings(files, objectives), notes or Notes())


def adds(run: Run) -> None:
    """Its state is the sum of the epochs done, which shows any epoch left out or done twice."""
    total = run.load() or 0
    for epoch in run.epochs():
        total += epoch + 1
        run.save(total)
        run.report(loss=total)


def test_config_is_a_copy(tmp_path: Path) -> None:
    given_config = {"lr": 0.1}

    def train(run: Run) -> float:
        assert type(run.config) is dict
        run.config["lr"] = 99
        return 0.0

    assert run(train, tmp_path, config=given_config).status == "completed"
    assert given_config == {"lr": 0.1}


def test_the_same_seed_gives_the_same_numbers(tmp_path: Path) -> None:
    def train(run: Run) -> dict[str, float]:
        import random

        import numpy as np
        import torch

        return {
            "loss": random.random(),
            "np": np.random.rand(),
            "torch": torch.rand(()).item(),
            "seed": run.seed,
        }

    import numpy as np  # seeded only where loaded
    import torch

    found = []
    for seed in (5, 5, 6, 2**40):
        notes = Notes()
        assert run(train, tmp_path, notes, seed=seed, until=1).status == "completed"
        found.append(notes.metrics[0])
    assert found[0] == found[1]
    assert found[0]["loss"] != found[2]["loss"]
    assert found[0]["torch"] != found[2]["torch"]
    assert found[3]["seed"] == 2**40
    assert np is not None
    assert torch is not None


@settings(max_examples=60, deadline=None)
@given(
    until=st.integers(1, 12),
    dies=st.lists(st.integers(0, 12), max_size=4),
    saves_every=st.integers(1, 4),
    known_lag=st.integers(0, 3),
)
def test_whenever_it_dies_the_sum_is_right(
    tmp_path_factory: pytest.TempPathFactory, until: int, dies: list[int], saves_every: int, known_lag: int
) -> None:
    """Die in the given epochs, hear only part of the news, start again: the reports are those of an unbroken run."""
    files = tmp_path_factory.mktemp("run")
    heard: dict[int, float] = {}
    trained: list[int] = []

    class Death(BaseException):
        pass

    def attempt(death: int | None) -> End | None:
        notes = Notes()

        def train(run: Run) -> None:
            total = run.load() or 0
            for epoch in run.epochs():
                if death is not None and epoch == death:
                    raise Death
                trained.append(epoch)
                total += epoch + 1
                if epoch % saves_every == saves_every - 1:
                    run.save(total)
                run.report(loss=total)

        known = max(heard, default=0)
        end = run(train, files, notes, until=until, known=known)
        news = notes.reports if death is None else notes.reports[: max(0, len(notes.reports) - known_lag)]
        for epoch, metrics, _, _ in news:
            if epoch > max(heard, default=0):
                assert epoch == max(heard, default=0) + 1  # nothing lost
                heard[epoch] = metrics["loss"]
        return end

    for death in dies:
        attempt(death)
    begun = len(trained)
    end = attempt(None)
    assert end is not None
    assert end.status == "completed"
    assert heard == {n: n * (n + 1) / 2 for n in range(1, until + 1)}
    again = trained[begun:]
    assert again == list(range(until - len(again), until))  # from the last checkpoint on, each once
    shutil.rmtree(files)


@pytest.mark.parametrize("damage", ["cut", "flip state", "flip facts", "empty", "gone"])
@pytest.mark.parametrize("library", ["pickle", "torch"])
def test_a_damaged_checkpoint_falls_back_to_an_older_one(
    tmp_path: Path, damage: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    if library == "pickle":
        monkeypatch.delitem(sys.modules, "torch")

    def train(run: Run) -> None:
        state = run.load() or {"total": 0, "tensor": None}
        for epoch in run.epochs():
            state = {
                "total": state["total"] + epoch + 1,
                "tensor": torch.ones(3) if library == "torch" else None,
            }
            run.save(state)
            run.report(loss=state["total"])

    run(train, tmp_path, until=4, last=False)
    newest = tmp_path / "checkpoints/0/4.ckpt"
    data = bytearray(newest.read_bytes())
    if damage == "gone":
        newest.unlink()
    else:
        if damage == "cut":
            data = data[: len(data) // 2]
        elif damage == "empty":
            data = bytearray()
        else:
            data[10 if damage == "flip state" else -40] ^= 0xFF
        newest.write_bytes(bytes(data))
    notes = Notes()
    end = run(train, tmp_path, notes, until=6, start=4, known=4, checkpoint="checkpoints/0/4.ckpt")
    assert end.status == "completed"
    assert notes.epochs == [4, 5, 6]  # went on from epoch 3
    assert [metrics["loss"] for metrics in notes.metrics] == [10, 15, 21]


def test_half_written_files_are_swept(tmp_path: Path) -> None:
    run(adds, tmp_path, until=2, last=False)
    (tmp_path / "checkpoints/0/.99999.tmp").write_bytes(b"half")
    run(adds, tmp_path, until=3, start=2, known=2)
    assert not list((tmp_path / "checkpoints/0").glob(".*"))


def test_two_checkpoints_are_kept_within_a_segment(tmp_path: Path) -> None:
    """The newest, one to fall back to, and those that segments ended with."""
    run(adds, tmp_path, until=5, last=False)
    run(adds, tmp_path, until=20, start=5, known=5, checkpoint="checkpoints/0/5.ckpt")
    names = sorted(path.name for path in (tmp_path / "checkpoints/0").iterdir())
    assert names == ["19.ckpt", "20.ckpt", "4.ckpt", "5.ckpt"]


@pytest.mark.parametrize("named", ["checkpoints/1/4.ckpt", "checkpoints/0/8.ckpt", None])
def test_checkpoints_of_another_lineage_are_not_taken(tmp_path: Path, named: str | None) -> None:
    """PBT: trial 0 goes to trial 1's weights with a new learning rate; its own later files are of the old life."""
    run(adds, tmp_path, until=8)  # its own files: epochs 7 and 8
    run(adds, tmp_path, trial=1, until=4, seed=8)
    notes = Notes()
    run(
        adds,
        tmp_path,
        notes,
        start=4,
        until=9,
        config={"lr": 0.2},
        copy_from=(1, 4),
        checkpoint=named,
        known=8,
    )
    assert notes.epochs == [5, 6, 7, 8, 9]
    assert notes.metrics[0] == {"loss": 15}


def test_a_restarted_copy_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    run(adds, tmp_path, trial=1, until=4, seed=8)
    copy = {"start": 4, "until": 9, "copy_from": (1, 4), "checkpoint": "checkpoints/1/4.ckpt", "known": 4}
    run(adds, tmp_path, Notes(stop_at=6, keep=True), **copy)
    notes = Notes()
    run(adds, tmp_path, notes, **(copy | {"known": 6}))
    assert notes.epochs == [7, 8, 9]
    assert notes.metrics[-1] == {"loss": 45}


def test_files_of_another_study_are_not_taken(tmp_path: Path) -> None:
    execute(adds, spec(), Settings(tmp_path, ("loss",), "a"), Notes())
    notes = Notes()
    execute(adds, spec(), Settings(tmp_path, ("loss",), "b"), notes)
    assert notes.epochs == [1, 2, 3]


def test_a_finished_segment_is_only_told_again(tmp_path: Path) -> None:
    """The worker died after the last checkpoint: the function is not even called."""
    run(adds, tmp_path)
    notes = Notes()

    def never(run: Run) -> None:
        raise AssertionError("called")

    end = run(never, tmp_path, notes, known=1)
    assert (end.status, end.epoch) == ("completed", 3)
    assert notes.epochs == [2, 3]


def test_state_is_taken_when_save_is_called(tmp_path: Path) -> None:
    """Changes after the call don't get into the file."""

    def train(run: Run) -> None:
        state = run.load()
        if state is not None:
            assert state == {"w": [1.0]}
        for _ in run.epochs():
            state = {"w": [1.0]}
            run.save(state)
            state["w"][0] = 2.0
            run.report(loss=0.0)

    assert run(train, tmp_path, until=1, last=False).status == "paused"
    assert (
        run(train, tmp_path, until=2, start=1, checkpoint="checkpoints/0/1.ckpt", known=1).status
        == "completed"
    )


def test_a_failed_epoch_leaves_no_checkpoint(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        for epoch in run.epochs():
            run.save(epoch)
            if epoch == 1:
                raise RuntimeError("after save, before the end of the epoch")
            run.report(loss=0.0)

    notes = Notes()
    assert run(train, tmp_path, notes).status == "failed"
    assert [path.name for path in (tmp_path / "checkpoints/0").iterdir()] == ["1.ckpt"]
    assert notes.paths == [(1, "checkpoints/0/1.ckpt")]


@pytest.mark.faults
def test_a_disk_that_takes_no_more_fails_the_trial_with_the_systems_words(tmp_path: Path) -> None:
    """And the checkpoint before it is whole."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def train(run: Run) -> None:
        for epoch in run.epochs():
            run.save(b"x" * (10 if epoch == 0 else 4 << 20))
            run.report(loss=0.0)

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        end = run(train, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert end.status == "failed"
    assert "File too large" in end.reason
    assert [path.name for path in (tmp_path / "checkpoints/0").iterdir()] == ["1.ckpt"]
    found = FileCheckpoints(tmp_path, 0, seed=7, config={"lr": 0.1}, until=3).find()
    assert found is not None
    assert found.load("cpu") == b"x" * 10


@pytest.mark.parametrize("keep", [True, False])
def test_stopping_ends_the_loop_but_lets_the_function_clean_up(tmp_path: Path, keep: bool) -> None:
    cleaned = []

    def train(run: Run) -> None:
        for epoch in run.epochs():
            run.report(loss=float(epoch))
        cleaned.append(run.should_stop)

    end = run(train, tmp_path, Notes(stop_at=2, keep=keep), until=9)
    assert (end.status, end.epoch, end.kept) == ("paused" if keep else "stopped", 2, keep)
    assert cleaned == [True]


def test_a_bare_except_does_not_keep_a_stopped_function_going(tmp_path: Path) -> None:
    calls = []

    def train(run: Run) -> None:
        for _ in range(10):
            try:
                run.report(loss=0.0)
            except:  # noqa: E722
                calls.append(1)
        return

    notes = Notes()
    end = run(train, tmp_path, notes, until=2)
    assert (end.status, end.epoch, notes.epochs) == ("completed", 2, [1, 2])
    assert len(calls) == 9  # left at the second report, and at each one after it


def test_a_drain_at_the_last_epoch_is_a_normal_end(tmp_path: Path) -> None:
    assert run(adds, tmp_path, Notes(stop_at=3, keep=True)).status == "completed"
    assert run(adds, tmp_path / "b", Notes(stop_at=3, keep=False)).status == "stopped"


def test_a_report_after_the_loop_is_the_last_epochs(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        for _ in run.epochs():
            pass
        run.report(loss=0.5)

    notes = Notes()
    assert run(train, tmp_path, notes, until=4).status == "completed"
    assert notes.epochs == [4]


def test_a_second_report_after_the_loop_is_an_error(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        for _ in run.epochs():
            run.report(loss=0.5)
        run.report(loss=0.6)

    end = run(train, tmp_path)
    assert end.status == "failed"
    assert "inside the loop" in end.reason


def test_epochs_without_report_count(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        for epoch in run.epochs():
            if epoch % 2:
                run.report(loss=float(epoch))

    notes = Notes()
    assert run(train, tmp_path, notes, until=6).epoch == 6
    assert notes.epochs == [2, 4, 6]


def test_the_loop_takes_the_smaller_of_total_and_budget(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        for epoch in run.epochs(total=5):
            run.report(loss=float(epoch))

    for until, expected, status in ((3, 3, "completed"), (9, 5, "completed"), (None, 5, "completed")):
        notes = Notes()
        end = run(train, tmp_path, notes, until=until)
        assert (len(notes.epochs), end.status) == (expected, status)


def test_nested_loops_are_refused(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        for _ in run.epochs():
            for _ in run.epochs():
                pass

    end = run(train, tmp_path)
    assert end.status == "failed"
    assert end.reason.startswith("InvalidInput: run.epochs() is already")


@pytest.mark.parametrize(
    ("first", "second", "until"),
    [(2, 2, None), (2, 2, 1), (3, 2, 9), (None, None, 3), (None, 5, 3), (0, 0, 3)],
)
def test_a_second_loop_that_could_do_nothing_is_refused(tmp_path, first, second, until):
    def train(run: Run) -> None:
        for total in (first, second):
            for epoch in run.epochs(total):
                run.report(loss=float(epoch))

    end = run(train, tmp_path, until=until)
    assert end.status == "failed"
    written = "" if second is None else second
    assert end.reason.startswith(f"InvalidInput: A second loop over run.epochs({written}) would do nothing")
    assert "inf" not in end.reason


def test_a_second_loop_over_the_same_iterator_is_refused(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        epochs = run.epochs(3)
        for _ in range(2):
            for epoch in epochs:
                run.report(loss=float(epoch))

    assert "A second loop over run.epochs(3)" in run(train, tmp_path).reason


@pytest.mark.parametrize("until", [1, 2, 4, 9, None])
def test_a_later_phase_goes_on_where_the_one_before_ended(tmp_path: Path, until: int | None) -> None:
    done: list[tuple[str, int]] = []

    def train(run: Run) -> None:
        for phase, total in (("warm up", 2), ("train", 5)):
            for epoch in run.epochs(total):
                done.append((phase, epoch))
                run.save(epoch)
                run.report(loss=float(epoch))

    assert run(train, tmp_path, until=until, last=False).status in ("paused", "completed")
    every = [("warm up", 0), ("warm up", 1), ("train", 2), ("train", 3), ("train", 4)]
    assert done == every[:until]
    run(train, tmp_path, start=len(done), known=len(done), until=5)
    assert done == every


def test_no_loop_follows_one_that_was_left_by_break(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        for _ in run.epochs():
            run.report(loss=1.0)
            break
        for _ in run.epochs():
            pass

    assert "left by break" in run(train, tmp_path).reason


def test_the_meter_is_read_once_per_epoch(tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def epoch_begin(self) -> None:
            self.calls.append("begin")

        def close(self) -> None:
            pass

        def epoch_end(self) -> Measurement | None:
            self.calls.append("end")
            return Measurement(2.0, "J", Source.MEASURED, 0.1)

    meter = Counter()
    notes = Notes()

    def train(run: Run) -> None:
        for epoch in run.epochs():
            if epoch != 1:
                run.report(loss=0.0)

    execute(train, spec(), Settings(tmp_path, ("loss",), make_meter=lambda devices: meter), notes)
    assert meter.calls.count("end") == 3
    energies = [report[3] for report in notes.reports]
    assert energies[0] == (2.0, "J", 0, 0.1)
    assert energies[1] is not None
    assert energies[1][0] == 4.0  # with that of the epoch that was not reported


def test_torch_state_comes_back(tmp_path: Path) -> None:
    import torch

    def train(run: Run) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.Adam(model.parameters())
        state = run.load()
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
        for _ in run.epochs():
            loss = model(torch.rand(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "rng": torch.get_rng_state(),
                }
            )
            run.report(loss=loss)

    whole, first, second = Notes(), Notes(), Notes()
    run(train, tmp_path / "a", whole, until=6)
    run(train, tmp_path / "b", first, until=3, last=False)
    run(train, tmp_path / "b", second, until=6, start=3, known=3, checkpoint="checkpoints/0/3.ckpt")
    assert whole.metrics == first.metrics + second.metrics


def test_large_states_are_read_in_pieces(tmp_path: Path) -> None:
    box = FileCheckpoints(tmp_path, 1, seed=0, config={})
    state = os.urandom(5 << 20)
    box.stage({"blob": state})
    path = box.commit(3, [])
    assert path == "checkpoints/1/3.ckpt"
    found = FileCheckpoints(tmp_path, 1, seed=0, config={}).find()
    assert found is not None
    assert (found.epoch, found.load("cpu")["blob"] == state) == (3, True)


class AnyThread(Notes):
    """A sink like a local worker's: it may be told by another thread. Looks at the checkpoint of each report."""

    any_thread = True

    def __init__(self, files: Path) -> None:
        super().__init__()
        self.files = files
        self.found: list[int | None] = []
        self.by: list[str] = []

    def reported(self, report: Report) -> None:
        super().reported(report)
        found = FileCheckpoints(self.files, 0, seed=7, config={"lr": 0.1}, until=9).find()
        self.found.append(None if found is None else found.epoch)
        self.by.append(threading.current_thread().name)


def unhurried(run: Run) -> None:
    state = run.load() or {"epoch": 0}
    for epoch in run.epochs():
        time.sleep(0.004)
        state = {"epoch": epoch + 1, "before": state["epoch"]}
        run.save(state)
        state["epoch"] = -1  # what is saved is what was there
        state = {"epoch": epoch + 1}
        run.report(loss=float(epoch))


def test_checkpoints_written_meanwhile_are_there_before_their_reports(tmp_path: Path) -> None:
    notes = AnyThread(tmp_path)
    end = run(unhurried, tmp_path, notes, until=6)
    assert end.status == "completed"
    assert notes.epochs == [1, 2, 3, 4, 5, 6]
    assert notes.found == [1, 2, 3, 4, 5, 6]
    assert [epoch for epoch, _ in notes.paths] == [1, 2, 3, 4, 5, 6]
    assert "penstock-files" in notes.by
    assert notes.by[-1] == threading.current_thread().name  # nothing is left to do meanwhile
    assert sorted(os.listdir(tmp_path / "checkpoints" / "0")) == ["5.ckpt", "6.ckpt"]
    found = FileCheckpoints(tmp_path, 0, seed=7, config={"lr": 0.1}, until=6).find()
    assert found is not None
    assert found.load("cpu") == {"epoch": 6, "before": 5}
    more = AnyThread(tmp_path)
    assert run(unhurried, tmp_path, more, start=6, until=9, known=6).status == "completed"
    assert more.found == [7, 8, 9]
    assert sorted(os.listdir(tmp_path / "checkpoints" / "0")) == ["5.ckpt", "6.ckpt", "8.ckpt", "9.ckpt"]


def test_what_was_done_before_an_error_is_told(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        for epoch in run.epochs():
            time.sleep(0.004)
            if epoch == 2:
                raise ValueError("no more")
            run.save(epoch)
            run.report(loss=0.0)

    notes = AnyThread(tmp_path)
    end = run(train, tmp_path, notes, until=5)
    assert (end.status, end.reason) == ("failed", "ValueError: no more")
    assert (notes.epochs, notes.found) == ([1, 2], [1, 2])


def test_an_epoch_whose_checkpoint_cant_be_written_meanwhile_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "0").write_text("in the way")
    notes = AnyThread(tmp_path)
    end = run(unhurried, tmp_path, notes, until=4)
    assert end.status == "failed"
    assert "Error" in end.reason
    assert "checkpoints/0" in end.reason
    assert notes.epochs == []


def test_a_file_opened_in_vain_leaves_nothing(tmp_path: Path) -> None:
    run(unhurried, tmp_path, AnyThread(tmp_path))

    def train(run: Run) -> None:
        for _ in run.epochs():
            time.sleep(0.004)
            run.report(loss=0.0)

    assert run(train, tmp_path, AnyThread(tmp_path), trial=5).status == "completed"
    assert os.listdir(tmp_path / "checkpoints") == ["0"]


def test_unwind_is_no_exception() -> None:
    assert not issubclass(Unwind, Exception)


def test_folder_outlives_the_run(tmp_path: Path) -> None:
    def train(run: Run) -> float:
        (run.folder / "note").write_text("kept")
        return 0.0

    run(train, tmp_path)
    assert (tmp_path / "trials/0/note").read_text() == "kept"


def test_metrics_without_names_are_refused_with_what_to_write(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        with pytest.raises(
            InvalidInput, match=r"by name, got \{'loss': 1\.0\}: write run\.report\(\*\*metrics\)"
        ):
            run.report({"loss": 1.0})
        with pytest.raises(InvalidInput, match=r"by name, got 0\.5: write run\.report\(loss=\.\.\.\)"):
            run.report(0.5)
        run.report(loss=0.0)

    run(train, tmp_path)


def test_negative_total_is_refused(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        with pytest.raises(InvalidInput, match="-1"):
            run.epochs(-1)
        run.report(loss=0.0)

    run(train, tmp_path)


class Hears(Notes):
    """Remembers notes, too."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__(stop_at)
        self.notes: list[tuple[str, Any]] = []

    def noted(self, topic: str, data: Any) -> None:
        self.notes.append((topic, data))


@pytest.mark.parametrize(("total", "until", "noted"), [(None, None, 1), (30, None, 0), (None, 30, 0)])
def test_a_loop_without_an_end_is_told_once(tmp_path, total, until, noted):
    def train(run: Run) -> None:
        for _ in run.epochs(total):
            run.report(loss=1.0)

    notes = Hears(stop_at=30)
    run(train, tmp_path, notes, until=until)
    assert notes.epochs == list(range(1, 31))
    assert notes.notes == [("endless", {"epochs": 20})] * noted


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda trial: trial.suggest_float("lr", 0, 1), "suggest_float.*space.*run.config"),
        (lambda trial: trial.should_prune(), "should_prune.*run.should_stop"),
        (lambda trial: trial.params["lr"], "run.config"),
        (lambda trial: trial.number, "run.trial"),
        (lambda config: config["lr"], r"run.config\['lr'\]"),
        (list, "'Run' object is not iterable"),
        (lambda run: run.reprot(loss=1), "'Run' object has no attribute 'reprot'$"),
    ],
)
def test_functions_of_other_tuners_are_told_what_to_write(tmp_path, ask, said):
    end = run(ask, tmp_path)
    assert end.status == "failed"
    assert re.search(said, end.reason), end.reason
