"""How failures of training functions are told."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from penstock.train._run import Run
from penstock.train._task import Task
from penstock.train._worker import End, Settings, Spec, execute


class Silent:
    def reported(self, report: Any) -> None: ...
    def saved(self, epoch: int, path: str) -> None: ...
    def told(self) -> None:
        return None


def run(work: Any, files: Path) -> End:
    spec = Spec(0, {}, 0, 0, 3, True, None, None, 0, 0)
    return execute(work, spec, Settings(files, ("loss",)), Silent())


def test_chained_exceptions_keep_the_users_frames(tmp_path: Path) -> None:
    def inner() -> None:
        raise KeyError("inner")

    def train(run: Run) -> None:
        for _ in run.epochs():
            try:
                inner()
            except KeyError as error:
                raise RuntimeError("outer") from error

    end = run(train, tmp_path)
    assert end.reason == "RuntimeError: outer"
    assert "in inner" in end.error
    assert "direct cause" in end.error
    assert "train/_worker.py" not in end.error
    assert "train/_run.py" not in end.error


def test_errors_of_the_run_point_at_the_users_line(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        for _ in run.epochs():
            run.report(loss=float("nan"))  # here

    end = run(train, tmp_path)
    assert "# here" in end.error
    assert end.error.count("File ") == 1
    assert end.error.rstrip().endswith(end.reason)


def test_a_syntax_error_is_told(tmp_path: Path) -> None:
    end = run(lambda run: eval("1 +"), tmp_path)
    assert end.reason.startswith("SyntaxError")


def test_an_exception_that_cannot_print_itself_is_told(tmp_path: Path) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

        def __reduce__(self) -> Any:
            raise TypeError("can't pickle")

    def train(run: Run) -> None:
        raise Mute

    end = run(train, tmp_path)
    assert (end.status, "Mute" in end.reason) == ("failed", True)


def test_a_bottomless_recursion_is_told_briefly(tmp_path: Path) -> None:
    def deeper(n: int) -> int:
        return deeper(n + 1) + 1

    end = run(lambda run: deeper(0), tmp_path)
    assert end.reason.startswith("RecursionError")
    assert len(end.error) < 100_000


def test_exception_groups_are_told(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])

    end = run(train, tmp_path)
    assert "ValueError: one" in end.error
    assert "several" in end.reason


@pytest.mark.parametrize("text", ["a\udcffb", "nul\0byte", "x" * 10**6])
def test_any_text_can_be_stored(tmp_path: Path, text: str) -> None:
    def train(run: Run) -> None:
        raise ValueError(text)

    end = run(train, tmp_path)
    assert "\0" not in end.error + end.reason
    (end.error + end.reason).encode()
    assert len(end.reason) <= 300
    assert len(end.error) < 100_000


def test_keyboard_interrupt_inside_a_training_is_a_failure(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        raise KeyboardInterrupt

    assert run(train, tmp_path).status == "failed"


def test_a_trial_of_its_own_length_that_was_done_before_is_done(tmp_path: Path) -> None:
    """The driver died between the news of its last epoch and that of its end."""

    def train(run: Run) -> None:
        if run.load() == 2:
            return
        for epoch in run.epochs():
            run.report(loss=1.0)
            run.save(epoch + 1)
            if epoch == 1:
                break

    settings = Settings(tmp_path, ("loss",))
    first = execute(train, Spec(0, {}, 0, 0, None, True, None, None, 0, 0), settings, Silent())
    assert (first.status, first.epoch) == ("completed", 2)
    again = execute(train, Spec(0, {}, 0, 2, None, True, None, None, 2, 0), settings, Silent())
    assert (again.status, again.epoch, again.reason) == ("completed", 2, "")
    unheard = execute(train, Spec(0, {}, 0, 0, None, True, None, None, 1, 0), settings, Silent())
    assert (unheard.status, unheard.epoch) == ("completed", 2)  # and its last report was sent again
    nothing = execute(lambda run: None, Spec(1, {}, 0, 0, None, True, None, None, 0, 0), settings, Silent())
    assert "reported nothing" in nothing.reason


@pytest.mark.parametrize(("start", "until", "named"), [(0, 1, "in epoch 1,"), (1, 4, "in epochs 2 to 4,")])
def test_who_reports_too_late_for_a_scheduler_is_told_what_it_was_given(
    tmp_path: Path, start: int, until: int, named: str
) -> None:
    """Validated every fifth epoch, as a rung ends before."""

    def train(run: Run) -> None:
        for epoch in run.epochs():
            if epoch % 5 == 4:
                run.report(loss=1.0)

    spec = Spec(0, {}, 0, start, until, False, None, None, start, 0)
    end = execute(train, spec, Settings(tmp_path, ("loss",)), Silent())
    assert end.status == "failed"
    assert f"reported nothing {named} all it was given" in end.reason
    assert "min_epochs" in end.reason


def test_what_penstock_refuses_by_itself_shows_no_frames_of_its_own(tmp_path: Path) -> None:
    end = run(Task(lambda: None, ([[1.0]], [1.0]), len), tmp_path)
    assert end.reason.startswith("InvalidInput: ")
    assert end.error == ""
    nan = run(lambda run: {"loss": float("nan")}, tmp_path)
    assert "nan" in nan.reason
    assert nan.error == ""
    assert run(lambda run: (1, 2), tmp_path).error == ""


def test_a_mistake_inside_penstock_shows_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Run, "_finish")  # stands for a bug: its frames are all there is to find it by
    assert "train/_worker.py" in run(lambda run: {"loss": 1.0}, tmp_path).error


def test_what_only_the_script_defines_is_told_with_what_to_do(tmp_path: Path) -> None:
    Net = type("Net", (), {"__module__": "__main__"})  # as it is in a worker, whose __main__ is another

    def train(run: Run) -> None:
        pickle.dumps(Net())

    reason = run(train, tmp_path).reason
    assert "__main__.Net" in reason
    assert reason.endswith("define it in a module to import, or keep it with run.save()")
