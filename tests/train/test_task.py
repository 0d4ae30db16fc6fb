"""Task and Data: how hyperparameters reach their parts, what is refused and with which words."""

import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from penstock.core.errors import InvalidInput
from penstock.train import _loader
from penstock.train._loop import Trainer
from penstock.train._task import Data, Task

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


@pytest.fixture(autouse=True)
def _fresh_cache():
    yield
    _loader.forget()


def linear():
    return nn.Linear(4, 2)


def task(**more):
    given = {"model": linear, "data": (X, Y), "loss": F.cross_entropy, **more}
    return Task(given.pop("model"), given.pop("data"), given.pop("loss"), **given)


def group(made, config):
    return Trainer(made, config, seed=0).optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("optimizer", "config", "expected"),
    [
        (
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.8, "nesterov": True},
            {"momentum": 0.8, "nesterov": True},
        ),
        (torch.optim.Adam, {"lr": 0.1, "beta1": 0.8}, {"betas": (0.8, 0.999)}),
        (
            torch.optim.AdamW,
            {"lr": 0.1, "beta2": 0.9, "weight_decay": 0.3},
            {"betas": (0.9, 0.9), "weight_decay": 0.3},
        ),
        (torch.optim.Adam, {"lr": 0.1, "betas": [0.7, 0.8], "eps": 1e-6}, {"betas": (0.7, 0.8), "eps": 1e-6}),
        (torch.optim.RMSprop, {"lr": 0.1, "alpha": 0.9}, {"alpha": 0.9}),
        (torch.optim.Adadelta, {"lr": 0.5, "rho": 0.7}, {"rho": 0.7}),
    ],
)
def test_the_optimizer_takes_its_hyperparameters_by_name(optimizer, config, expected):
    found = group(task(optimizer=optimizer), config)
    assert found["lr"] == config["lr"]
    for name, value in expected.items():
        assert found[name] == value


def test_the_configuration_chooses_among_optimizers():
    made = task(optimizer={"sgd": torch.optim.SGD, "adam": torch.optim.Adam})
    assert isinstance(Trainer(made, {"lr": 0.1, "optimizer": "adam"}, seed=0).optimizer, torch.optim.Adam)
    with pytest.raises(InvalidInput, match=r"'lion' is not one of 'sgd', 'adam'"):
        Trainer(made, {"lr": 0.1, "optimizer": "lion"}, seed=0)


def test_defaults_are_overridden_by_the_configuration():
    made = task(defaults={"lr": 0.5, "momentum": 0.9})
    assert group(made, {})["lr"] == 0.5
    assert group(made, {"lr": 0.1})["lr"] == 0.1
    assert group(made, {"lr": 0.1})["momentum"] == 0.9


@pytest.mark.parametrize(
    ("factory", "config", "width"),
    [
        (lambda config: nn.Linear(4, config["width"]), {"width": 3}, 3),
        (lambda c: nn.Linear(4, c.get("width", 7)), {}, 7),
        (lambda width: nn.Linear(4, width), {"width": 3}, 3),
        (lambda width=5: nn.Linear(4, width), {}, 5),
        (lambda **kwargs: nn.Linear(4, kwargs["width"]), {"width": 6}, 6),
        (lambda config, width=2: nn.Linear(4, width), {"width": 8}, 8),
    ],
)
def test_the_model_factory_takes_the_configuration_or_names_of_it(factory, config, width):
    made = task(model=factory, loss=lambda o, t: o.mean())
    assert Trainer(made, {"lr": 0.1, **config}, seed=0).model.out_features == width


def test_a_class_with_names_is_a_factory_too():
    class Net(nn.Module):
        def __init__(self, width, depth=1):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, width), *[nn.Linear(width, width) for _ in range(depth)])

    model = Trainer(task(model=Net), {"lr": 0.1, "width": 3, "depth": 2}, seed=0).model
    assert len(model.layers) == 3


def test_names_that_nobody_takes():
    with pytest.raises(InvalidInput, match=r"Nothing takes the hyperparameter 'momentun'.*SGD.*linear"):
        Trainer(task(), {"lr": 0.1, "momentun": 0.9}, seed=0)
    # A factory that gets everything might use it another time: a warning, once.
    made = task(model=lambda config: nn.Linear(4, config["width"]))
    with pytest.warns(UserWarning, match="'widht'"):
        Trainer(made, {"lr": 0.1, "width": 2, "widht": 3}, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(made, {"lr": 0.1, "width": 2, "widht": 3}, seed=0)
        Trainer(task(), {"lr": 0.1, "batch_size": 8, "clip_norm": 1.0, "momentum": 0.9}, seed=0)


def test_a_factory_of_names_takes_no_others():
    made = task(model=lambda width=2, depth=1: nn.Linear(4, width))
    with pytest.raises(InvalidInput, match="Nothing takes the hyperparameter 'widht'"):
        Trainer(made, {"lr": 0.1, "widht": 3}, seed=0)
    assert Trainer(made, {"lr": 0.1, "width": 3, "depth": 2}, seed=0).model.out_features == 3
    given = task(model=lambda width, depth: nn.Linear(4, width * depth), defaults={"depth": 2})
    assert Trainer(given, {"lr": 0.1, "width": 3}, seed=0).model.out_features == 6
    several = task(optimizer={"sgd": torch.optim.SGD, "adam": torch.optim.Adam})
    with pytest.warns(UserWarning, match="'momentum'"):  # the other one takes it
        Trainer(several, {"lr": 0.1, "optimizer": "adam", "momentum": 0.9}, seed=0)
    with pytest.raises(InvalidInput, match="'momentun'"):
        Trainer(several, {"lr": 0.1, "optimizer": "adam", "momentun": 0.9}, seed=0)


def test_the_same_seed_gives_the_same_weights():
    a, b, c = (Trainer(task(), {"lr": 0.1}, seed=s).model.weight for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(
    ("config", "more", "words"),
    [
        ({}, {}, r'No learning rate.*"lr".*pk\.Float'),
        ({"lr": -1.0}, {}, r"SGD\(lr=-1.0\) refuses"),
        ({"lr": 0.1, "batch_size": 0}, {}, "batch_size.*0"),
        ({"lr": 0.1, "batch_size": 2.5}, {}, "batch_size.*2.5"),
        ({"lr": 0.1, "epochs": 3}, {"model": lambda config: nn.Linear(4, 2)}, r"epochs.*pk\.Full"),
        (
            {"lr": 0.1},
            {"optimizer": lambda params, lr: torch.optim.LBFGS(params, lr)},
            "LBFGS.*closure.*AdamW",
        ),
        ({"lr": 0.1}, {"model": lambda: "net"}, "made a str, not an nn.Module"),
        (
            {"lr": 0.1},
            {"schedule": torch.optim.lr_scheduler.CosineAnnealingLR},
            r"schedule=CosineAnnealingLR.*'T_max'.*lambda optimizer, epochs: CosineAnnealingLR\(optimizer",
        ),
        ({"lr": 0.1}, {"model": lambda: nn.ReLU()}, "no parameters"),
        ({"lr": 0.1}, {"model": lambda config: nn.Linear(4, config["width"])}, "asks for 'width'.*lr"),
        ({"lr": 0.1}, {"model": lambda config, width: nn.Linear(4, width)}, "wants 'width'"),
    ],
)
def test_configurations_that_cannot_work(config, more, words):
    with pytest.raises(InvalidInput, match=words):
        Trainer(task(**more), config, seed=0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": linear()}, "function that makes the network"),
        ({"model": 3}, "model must be a function"),
        ({"epochs": 0}, "epochs.*0"),
        ({"batch_size": 1.5}, "batch_size.*1.5"),
        ({"clip_norm": 0}, "clip_norm"),
        ({"clip_norm": "1"}, "clip_norm must be a number above 0, got '1'"),
        ({"defaults": ["momentum"]}, r"defaults must be values by name.*\['momentum'\]"),
        ({"metrics_on": "all"}, "metrics_on"),
        ({"target": ("accuracy", 0.9)}, "'accuracy'; the task reports loss, train_loss"),
        ({"target": ("loss", "<", 0.9)}, "target must be"),
        ({"target": 0.9}, "target must be"),
        ({"metrics": {"loss": F.cross_entropy}}, "always reported"),
        ({"metrics": {"accuracy": 3}}, "must be a function"),
        ({"metrics": [F.cross_entropy]}, "metrics must be functions by name"),
        ({"loss": nn.CrossEntropyLoss}, r"got the class CrossEntropyLoss: write loss=CrossEntropyLoss\(\)"),
        ({"optimizer": "adam"}, "optimizer must be a class.*'adam'"),
        ({"schedule": "cosine"}, "schedule must be a function.*'cosine'"),
        ({"checkpoint_steps": 0}, "checkpoint_steps"),
        ({"optimizer": torch.optim.LBFGS}, r"optimizer=LBFGS.*closure.*AdamW.*train\(run\)"),
        ({"optimizer": {"sgd": torch.optim.SGD, "lbfgs": torch.optim.LBFGS}}, "optimizer=LBFGS.*closure"),
    ],
)
def test_tasks_that_cannot_work(more, words):
    with pytest.raises(InvalidInput, match=words):
        task(**more)


def test_numbers_of_numpy_are_taken():
    made = task(
        epochs=np.int64(3), batch_size=np.int32(8), checkpoint_steps=np.int64(2), clip_norm=np.float32(1)
    )
    assert (made.epochs, made.batch_size, made.checkpoint_steps) == (3, 8, 2)
    assert type(made.epochs) is int


def test_directions_of_targets():
    metrics = {"accuracy": F.cross_entropy, "perplexity": F.cross_entropy}
    at_least = task(metrics=metrics, target=("accuracy", 0.9)).target
    at_most = task(metrics=metrics, target=("perplexity", "<=", 30)).target
    loss = task(target=("loss", 0.5)).target
    assert at_least.reached({"accuracy": 0.9})
    assert not at_least.reached({"accuracy": 0.89})
    assert at_most.reached({"perplexity": 29.0})
    assert not at_most.reached({"perplexity": 31.0})
    assert loss.reached({"loss": 0.4})
    assert not loss.reached({"loss": 0.6})


class Pairs(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, i):
        return X[i], Y[i]


class Table:
    """As pandas has them: an array for numpy, but its items are columns."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, column):
        return self.values[:, column]

    def __array__(self, dtype=None, copy=None):
        return self.values


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (X.numpy(), Y.numpy()),
        (Table(X.numpy()), Table(Y.numpy())),
        TensorDataset(X, Y),
        Pairs(),
        lambda: (X, Y),
        lambda: Data.split(X, Y),
        Data(lambda: (X, Y)),
    ],
    ids=[
        "tensors",
        "arrays",
        "tables",
        "TensorDataset",
        "Dataset",
        "function",
        "function of Data",
        "Data of a function",
    ],
)
def test_every_form_of_data_gives_the_same_split(data):
    """A fifth is held out, the same samples whatever the form."""
    loaded = task(data=data).load(torch.device("cpu"))
    expected = Data.split(X, Y, val=0.2, seed=0)
    assert loaded.train.n == 40
    assert loaded.val.n == 10
    ((x, y),) = loaded.train.batches(40)
    assert torch.equal(x, expected.train[0])
    assert torch.equal(y.long(), expected.train[1])


@pytest.mark.parametrize(
    "data",
    [
        Data((X[:30], Y[:30]), (X[30:], Y[30:])),
        ((X[:30], Y[:30]), (X[30:], Y[30:])),
        {"train": (X[:30], Y[:30]), "val": (X[30:], Y[30:])},
        (TensorDataset(X[:30], Y[:30]), TensorDataset(X[30:], Y[30:])),
    ],
)
def test_given_splits_are_kept(data):
    loaded = task(data=data).load(torch.device("cpu"))
    assert (loaded.train.n, loaded.val.n) == (30, 20)
    ((x, _),) = loaded.val.batches(50)
    assert torch.equal(x, X[30:])


def test_split_is_a_partition_that_the_seed_decides():
    a, b, c = (Data.split(X, Y, val=0.3, seed=s) for s in (1, 1, 2))
    assert torch.equal(a.val[0], b.val[0])
    assert not torch.equal(a.val[0], c.val[0])
    together = torch.cat([a.train[0], a.val[0]])
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, X.tolist()))
    for share in (0.0, 1.0, 0.001):
        with pytest.raises(InvalidInput, match=f"val={share}"):
            Data.split(X, Y, val=share)


def test_data_are_loaded_once_for_all_trials_also_after_pickling():
    calls = []

    def load():
        calls.append(1)
        return X, Y

    made = task(data=load)
    for seed in range(3):
        Trainer(made, {"lr": 0.1}, seed=seed)
    assert len(calls) == 1
    plain = task()
    shipped = pickle.loads(pickle.dumps(plain))
    assert plain.load(torch.device("cpu")) is shipped.load(torch.device("cpu"))


def test_metrics_without_validation_data_are_refused():
    made = task(data=Data((X, Y)), metrics={"accuracy": F.cross_entropy})
    with pytest.raises(InvalidInput, match=r"'accuracy' need validation data"):
        Trainer(made, {"lr": 0.1}, seed=0)
    # Without metrics the training loss is what there is to report.
    found = Trainer(task(data=Data((X, Y))), {"lr": 0.1}, seed=0).train_epoch()
    assert found["loss"] == found["train_loss"]


class Unsized(Dataset):
    def __getitem__(self, index):
        return X[index], Y[index]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((X, Y[:30]), "50 and 30 rows"),
        ((X[:30], Y), "30 and 50 rows"),
        ((X.tolist(), Y.tolist()), r"torch\.tensor"),
        ((np.array([["a"], ["b"]] * 25), Y), "numbers, got a ndarray of <U1"),
        ((Table(np.array([None, "b"] * 25)), Y), "numbers, got a Table of object"),
        (Unsized(), "got a Unsized without a length"),
    ],
    ids=["few targets", "few inputs", "lists", "words", "table of words", "no length"],
)
def test_data_that_cannot_be_split(data, words):
    with pytest.raises(InvalidInput, match=words):
        task(data=data).load(torch.device("cpu"))


def test_data_of_no_known_form():
    with pytest.raises(InvalidInput, match="got a str"):
        task(data="mnist").load(torch.device("cpu"))


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield torch.zeros(4), 0


LOADER = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 4), torch.zeros(8).long()))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Endless(), "Endless.*map-style"),
        (Data(Endless()), "Endless.*map-style"),
        (LOADER, r"loader\.dataset"),
        ((LOADER, LOADER), r"loader\.dataset"),
        (Data(LOADER), r"loader\.dataset"),
    ],
)
def test_what_only_streams_is_refused_with_what_to_give(data, words):
    with pytest.raises(InvalidInput, match=words):
        task(data=data).load(torch.device("cpu"))


def test_numpy_inputs_keep_their_type():
    made = task(data=Data((np.ones((4, 4), np.float32), np.zeros(4, np.int64))))
    ((x, y),) = made.load(torch.device("cpu")).train.batches(4)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64


def test_the_module_of_task_loads_no_torch():
    code = "import sys, penstock.train._task, penstock.train._lr_range; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_factory_that_wants_a_name_the_configuration_lacks_says_which():
    task = Task(
        lambda width: torch.nn.Linear(4, width), Data((torch.zeros(4, 4), torch.zeros(4, 4))), F.mse_loss
    )
    with pytest.raises(InvalidInput, match="takes 'width', which the configuration \\(lr\\) lacks"):
        task.build_model({"lr": 0.1})

    def breaks(config):
        return torch.nn.Linear(4, config["lr"] / 0)

    with pytest.raises(ZeroDivisionError):  # a factory that looks into its configuration fails by itself
        Task(breaks, Data((torch.zeros(4, 4), torch.zeros(4, 4))), F.mse_loss).build_model({"lr": 0.1})
