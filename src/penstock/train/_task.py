"""Task and Data: a training described by its parts, so that Penstock owns the loop and can look inside."""

from __future__ import annotations

import copy
import inspect
import numbers
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from penstock.core.check import is_real
from penstock.core.errors import InvalidInput
from penstock.core.trial import Config

if TYPE_CHECKING:
    from penstock.train._loader import Loaded
    from penstock.train._loop import RunLike
    from penstock.train._surrogate import Surrogate

OWN_NAMES = frozenset({"batch_size", "clip_norm"})
"""Names of a configuration that the Task itself understands, beside those of model, optimizer and schedule."""


@final
@dataclass(frozen=True, slots=True)
class Data:
    """Training and validation data, loaded once per worker and shared by all trials there.

    Attributes:
        train: ``(inputs, targets)`` (tensors, arrays, or tuples, lists and dicts of them, one row per sample), a
            map-style ``Dataset`` of such pairs, or inputs alone, which are then their own targets.
        val: The same for validation; None: nothing is held out.
        memory_bytes: The most a split may take on the device; None: half of what is free. A larger one is
            streamed through a bounded queue instead.
        preload: True or False decides over preloading; None: preload what fits, except a Dataset that is seen to
            give other samples each time, for a preloaded sample is transformed only once. One whose transforms
            seldom draw random numbers needs False.
    """

    train: Any
    val: Any = None
    memory_bytes: int | None = None
    preload: bool | None = None
    token: str = field(default_factory=lambda: uuid.uuid4().hex, repr=False, compare=False)

    @classmethod
    def split(cls, inputs: Any, targets: Any, *, val: float = 0.2, seed: int = 0) -> Data:
        """Hold out a random part ``val`` (0..1) of the samples, chosen by ``seed``.

        Raises:
            InvalidInput: ``val`` leaves one of the two parts without samples, or inputs and targets are not of the
                same samples.
        """
        import torch

        from penstock.train._loader import derive, flatten, length

        leaves, rebuild = flatten((inputs, targets))
        n = length(leaves)
        held = round(n * val)
        if not 0 < held < n:
            raise InvalidInput(
                f"val={val!r} of {n} samples leaves a part empty: choose a share between 0 and 1."
            )
        order = torch.randperm(n, generator=torch.Generator().manual_seed(derive(seed, "split")))
        back, front = order[:held], order[held:]
        return cls(rebuild([leaf[front] for leaf in leaves]), rebuild([leaf[back] for leaf in leaves]))


@final
@dataclass(frozen=True, slots=True)
class Target:
    """A metric at which a training is good enough to finish."""

    metric: str
    value: float
    higher: bool

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether ``metrics`` are that good."""
        value = metrics[self.metric]
        return value >= self.value if self.higher else value <= self.value


@final
class Task:
    """A training that Penstock can fuse, shrink, explore, checkpoint and scale, for it owns the loop.

    Hyperparameters reach the parts by name: the optimizer gets those of its signature (``lr``, ``momentum``,
    ``weight_decay``, ``betas`` or ``beta1`` and ``beta2``, ...), the schedule and the model factory those of
    theirs; ``batch_size`` and ``clip_norm`` are the loop's. A name that nobody takes is an error, for a study
    would tune nothing with it (a warning in the worker's log where the factory gets the whole configuration, or
    another one of several optimizers takes it).

    Args:
        model: Makes the ``nn.Module``: a function of the configuration (``def make(config)``), of some of its
            names (``def make(width, dropout=0.1)``), or of nothing.
        data: A ``Data``; or ``(inputs, targets)`` or a Dataset, of which a fifth is held out; or a pair of
            Datasets (train, val); or a function that returns any of these, called once per worker, so that large
            data isn't pickled.
        loss: ``loss(output, targets)``, a scalar: the mean over the batch.
        metrics: By name, functions ``metric(output, targets)`` of the validation data.
        optimizer: A ``torch.optim`` class or anything called like one; or several by name, of which the
            configuration's ``optimizer`` chooses.
        epochs: Epochs of a training whose scheduler sets no other budget.
        batch_size: Where the configuration has none.
        schedule: ``schedule(optimizer, steps)`` gives a torch lr scheduler that is stepped after every batch;
            ``schedule(optimizer, epochs)`` or ``schedule(optimizer)`` one stepped after every epoch. Steps and
            epochs are those of a training that is never given up: ``max_epochs`` of the scheduler or the recurring
            job, else the task's ``epochs``. Further parameters come from the configuration.
        clip_norm: Clip the gradients' global norm.
        amp: Mixed precision: bfloat16 where the device has it, else float16 with loss scaling.
        target: ``("accuracy", 0.97)`` ends the training at that value or above, ``("perplexity", "<=", 30)`` at or
            below. ``loss`` and ``train_loss`` are at or below by themselves.
        forward: ``forward(model, inputs)``; without it tuples are spread over the model's arguments and
            dicts over its keywords.
        defaults: Hyperparameters that are not tuned, by name: ``{"momentum": 0.9}``.
        eval_batch_size: Rows per step of the validation.
        metrics_on: ``"set"``: metrics see the outputs of the whole validation data at once (right for any metric);
            ``"batch"``: they are averaged over batches (for outputs that don't fit the memory together).
        drop_last: Leave out an incomplete last batch.
        checkpoint_epochs: Save every so many epochs.
        checkpoint_steps: Save every so many steps too, for epochs that take long.
        channels_last: Whether images lie in memory with their channels last. None: on CPUs, where convolutions are
            faster for it, if a step is seen to work and to give the same loss so.
    """

    surrogate: Surrogate | None = None  # builds a narrow twin instead of the model: set by ``narrowed``
    span: int | None = None  # epochs of its lr schedules, if not its own: set by ``over``
    channels_last: bool | None = None  # of tasks that older versions pickled

    def __init__(
        self,
        model: Callable[..., Any],
        data: Any,
        loss: Callable[..., Any],
        *,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        optimizer: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
        epochs: int = 10,
        batch_size: int = 64,
        schedule: Callable[..., Any] | None = None,
        clip_norm: float | None = None,
        amp: bool = False,
        target: tuple[str, float] | tuple[str, str, float] | None = None,
        forward: Callable[..., Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        eval_batch_size: int = 256,
        metrics_on: str = "set",
        drop_last: bool = False,
        checkpoint_epochs: int = 1,
        checkpoint_steps: int | None = None,
        channels_last: bool | None = None,
    ) -> None:
        for name, part in (("model", model), ("loss", loss)):
            if not callable(part):
                raise InvalidInput(f"{name} must be a function, got {part!r}.")
        if isinstance(loss, type):
            raise InvalidInput(
                f"loss must be a function of an output and targets, got the class {loss.__name__}: write "
                f"loss={loss.__name__}()."
            )
        if not isinstance(metrics or {}, Mapping):
            raise InvalidInput(
                f'metrics must be functions by name, {{"accuracy": accuracy}}, got {metrics!r}.'
            )
        if schedule is not None and not callable(schedule):
            raise InvalidInput(f"schedule must be a function that makes an lr scheduler, got {schedule!r}.")
        counts: dict[str, Any] = {
            "epochs": epochs,
            "batch_size": batch_size,
            "eval_batch_size": eval_batch_size,
            "checkpoint_epochs": checkpoint_epochs,
            "checkpoint_steps": 1 if checkpoint_steps is None else checkpoint_steps,
        }
        for name, number in counts.items():
            if isinstance(number, bool) or not isinstance(number, numbers.Integral) or number < 1:
                raise InvalidInput(f"{name} must be a whole number of at least 1, got {number!r}.")
        if clip_norm is not None and not (is_real(clip_norm) and clip_norm > 0):
            raise InvalidInput(f"clip_norm must be a number above 0, got {clip_norm!r}; None clips nothing.")
        if not isinstance(defaults or {}, Mapping):
            raise InvalidInput(f'defaults must be values by name, {{"momentum": 0.9}}, got {defaults!r}.')
        if metrics_on not in ("set", "batch"):
            raise InvalidInput(f'metrics_on must be "set" or "batch", got {metrics_on!r}.')
        if channels_last not in (None, True, False):
            raise InvalidInput(f"channels_last must be True, False or None, got {channels_last!r}.")
        if optimizer is None:
            import torch

            optimizer = torch.optim.SGD
        _check_model(model)
        for make in optimizer.values() if isinstance(optimizer, Mapping) else (optimizer,):
            if not callable(make):
                raise InvalidInput(
                    f"optimizer must be a class such as torch.optim.SGD, or several by name, got {make!r}."
                )
            _check_step(make, make)
        self.model = model
        self.data = data if isinstance(data, Data) else Data(data)
        self._ready = isinstance(data, Data) and not callable(data.train)
        self.loss = loss
        self.metrics = dict(metrics or {})
        self.optimizer = dict(optimizer) if isinstance(optimizer, Mapping) else optimizer
        self.epochs = int(epochs)
        self.batch_size = int(batch_size)
        self.schedule = schedule
        self.clip_norm = clip_norm
        self.amp = amp
        self.forward = forward
        self.defaults = dict(defaults or {})
        self.eval_batch_size = int(eval_batch_size)
        self.metrics_on = metrics_on
        self.drop_last = drop_last
        self.checkpoint_epochs = int(checkpoint_epochs)
        self.checkpoint_steps = None if checkpoint_steps is None else int(checkpoint_steps)
        self.channels_last = channels_last
        self.target = _target(target, self.metrics)
        for name, metric in self.metrics.items():
            if not callable(metric):
                raise InvalidInput(f"The metric {name!r} must be a function, got {metric!r}.")
            if name in ("loss", "train_loss"):
                raise InvalidInput(
                    f"The metric {name!r} has the name of one that is always reported: rename it."
                )

    def __call__(self, run: RunLike) -> None:
        """Train as ``run`` says. Called by workers."""
        from penstock.train._loop import train

        train(self, run)

    def __repr__(self) -> str:
        return f"Task({_name(self.model)}, {_name(self.optimizer)}, epochs={self.epochs})"

    # ------------------------------------------------------------ narrow twins

    def narrowed(self, shrink: Any) -> Task:
        """This task on a narrow twin of its model, as ``pk.Shrink`` says."""
        from penstock.train._surrogate import Surrogate

        return self.at(Surrogate.of(self, shrink))

    def at(self, surrogate: Surrogate | None) -> Task:
        """This task with another twin; None: with the model as the factory makes it."""
        other = copy.copy(self)
        other.surrogate = surrogate
        return other

    def over(self, epochs: int | None) -> Task:
        """This task with lr schedules that go over so many epochs; None: as it is."""
        if epochs is None or self.schedule is None:
            return self
        other = copy.copy(self)
        other.span = epochs
        return other

    def full(self) -> Task:
        """This task on the full model, initialised and parametrized like its twin."""
        return self if self.surrogate is None else self.at(self.surrogate.at(1))

    def groups(self, model: Any, config: Config) -> list[Any]:
        """The trainable parameters of a model, in groups where its twin needs several learning rates."""
        if self.surrogate is not None:
            return self.surrogate.groups(self, model, config)
        return [p for p in model.parameters() if p.requires_grad]

    # ------------------------------------------------------------ what the loop asks for

    def load(self, device: Any) -> Loaded:
        """The data on ``device``, from the worker's cache if a trial was there before."""
        from penstock.train._loader import Loaded, load_split, shared

        def load() -> Loaded:
            data = self.data if self._ready else _as_data(self.data.train)
            if data.train is None:
                raise InvalidInput("The data has no training samples: Data(train=...) is None.")
            limit, preload = data.memory_bytes, data.preload
            train = load_split(data.train, device, limit_bytes=limit, preload=preload)
            val = None
            if data.val is not None:
                val = load_split(data.val, device, limit_bytes=limit, preload=preload)
            elif self.metrics:
                raise InvalidInput(
                    f"The metrics {', '.join(map(repr, self.metrics))} need validation data, and Data(val=...) "
                    "is missing. Give it, or use Data.split(inputs, targets, val=0.2)."
                )
            return Loaded(train, val)

        return shared((self.data.token, str(device)), load)

    def hyperparameters(self, config: Config) -> Config:
        """The configuration over the defaults."""
        return {**self.defaults, **config}

    def build_model(self, config: Config) -> tuple[Any, set[str]]:
        """The model or its twin, and the names of the configuration its factory looked at."""
        return self.build_plain(config) if self.surrogate is None else self.surrogate.build(self, config)

    def build_plain(self, config: Config) -> tuple[Any, set[str]]:
        """The model as the factory makes it, and the names of the configuration it looked at.

        Raises:
            InvalidInput: The factory wants a name that the configuration lacks, or made something else.
        """
        import torch

        seen = _Seen(config)
        args, kwargs, used = _arguments(self.model, seen, "model")
        try:
            model = self.model(*args, **kwargs)
        except InvalidInput:
            raise
        except Exception as error:
            # A factory of the whole configuration looks into it; one that wants a number can only break on it.
            if not args or args[0] is not seen or seen.looked_at:
                raise
            names, _ = _parameters(self.model)
            name = names[0] if names else "config"
            raise InvalidInput(
                f"The model factory {_name(self.model)} takes {name!r}, which the configuration "
                f"({', '.join(config) or 'empty'}) lacks, so it was called with the whole configuration and failed: "
                f"{error!r}. Add {name!r} to the space or to the task's defaults, or take a config and look into it."
            ) from error
        if not isinstance(model, torch.nn.Module):
            raise InvalidInput(
                f"model={_name(self.model)} made a {type(model).__name__}, not an nn.Module. "
                "Give the function that makes the network, not what calls it."
            )
        return model, used | seen.looked_at

    def build_optimizer(
        self, parameters: Any, config: Config, *, lr: float | None = None
    ) -> tuple[Any, set[str]]:
        """The optimizer with its hyperparameters out of the configuration, and their names.

        Raises:
            InvalidInput: No learning rate, or the optimizer refuses a value or wants a closure; says which.
        """
        make: Any = self.optimizer
        used: set[str] = set()
        if isinstance(make, dict):
            choice = config.get("optimizer")
            if choice not in make:
                raise InvalidInput(
                    f"optimizer={choice!r} is not one of {', '.join(map(repr, make))}: "
                    "the configuration must choose one of them."
                )
            make = make[choice]
            used.add("optimizer")
        names, takes_all = _parameters(make)
        known = [name for name in names if name not in ("params", "self")]
        chosen: dict[str, Any] = {}
        for name in known:
            if name in config:
                value = config[name]
                chosen[name] = tuple(value) if isinstance(value, list) else value
                used.add(name)
        if "betas" in known and "betas" not in chosen and ("beta1" in config or "beta2" in config):
            default = _default(make, "betas", (0.9, 0.999))
            chosen["betas"] = (config.get("beta1", default[0]), config.get("beta2", default[1]))
            used |= {"beta1", "beta2"} & set(config)
        if lr is not None:
            chosen["lr"] = lr
        if "lr" in known and "lr" not in chosen:
            raise InvalidInput(
                f"No learning rate: neither the configuration ({', '.join(config) or 'empty'}) nor the task's defaults "
                'hold "lr". Add lr=pk.Float(1e-4, 1, log=True) to the space, or defaults={"lr": 0.1} to the '
                "task, or use a scheduler that finds it (pk.SM2)."
            )
        if takes_all and "lr" in config:
            chosen.setdefault("lr", config["lr"])
            used.add("lr")
        parameters = list(parameters)
        if not parameters:
            raise InvalidInput(f"model={_name(self.model)} has no parameters to train.")
        try:
            made = make(parameters, **chosen)
        except (TypeError, ValueError) as error:
            values = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
            raise InvalidInput(f"{_name(make)}({values}) refuses: {error}") from error
        _check_step(make, made)
        if self.surrogate is not None:
            self.surrogate.scale(made)
        return made, used

    def build_schedule(
        self, optimizer: Any, config: Config, *, steps_per_epoch: int
    ) -> tuple[Any, bool, set[str]]:
        """The lr scheduler (or None), whether it is stepped per batch, and the names it took."""
        epochs = self.span or self.epochs
        if self.schedule is None:
            return None, False, set()
        names, _ = _parameters(self.schedule)
        kwargs: dict[str, Any] = {}
        used: set[str] = set()
        for name in names[1:]:
            if name == "steps":
                kwargs[name] = epochs * steps_per_epoch
            elif name == "epochs":
                kwargs[name] = epochs
            elif name in config:
                kwargs[name] = config[name]
                used.add(name)
        make = self.schedule
        try:
            inspect.signature(make).bind(optimizer, **kwargs)
        except TypeError as error:
            raise InvalidInput(
                f"schedule={_name(make)} can't be made ({error}): it is given the optimizer, steps, epochs and "
                "what it shares by name with the configuration. Name it in the space or the task's defaults, or write "
                f"schedule=lambda optimizer, epochs: {_name(make)}(optimizer, ...)."
            ) from None
        except ValueError:  # a built-in that does not tell
            pass
        if self.surrogate is not None:
            return self.surrogate.schedule(optimizer, lambda o: make(o, **kwargs)), "steps" in names, used
        return make(optimizer, **kwargs), "steps" in names, used

    def size_of_batches(self, config: Config) -> int:
        """The configuration's batch size, or the task's."""
        size = config.get("batch_size", self.batch_size)
        if isinstance(size, bool) or int(size) != size or size < 1:
            raise InvalidInput(f"batch_size must be a whole number of at least 1, got {size!r}.")
        return int(size)

    def check_names(self, config: Config, used: set[str], *, certain: bool) -> str | None:
        """A text on the names nobody took, or None; an error if it is certain that nobody does."""
        unknown = [
            name
            for name in config
            if name not in used and name not in OWN_NAMES and name not in self.defaults
        ]
        if not unknown:
            return None
        names = ", ".join(map(repr, unknown))
        if "epochs" in unknown:
            raise InvalidInput(
                "epochs is no hyperparameter of a task: how long a trial trains is the scheduler's affair "
                "(pk.Full(epochs=20), pk.Hyperband, pk.ASHA). Remove it from the space."
            )
        text = (
            f"Nothing takes the hyperparameter {names}: the optimizer {_name(self.optimizer)} has no such "
            f"parameter and the model factory {_name(self.model)} did not look at it. "
            "Remove it from the space, or use it in the factory."
        )
        others = self.optimizer.values() if isinstance(self.optimizer, dict) else ()
        if certain and not all(any(name in _parameters(make)[0] for make in others) for name in unknown):
            raise InvalidInput(text)
        return text

    def factory_gets_all(self, config: Config) -> bool:
        """Whether the factory gets the whole configuration, so that what it uses is only seen, not known."""
        seen = _Seen(config)
        return any(given is seen for given in _arguments(self.model, seen, "model")[0])


class _Seen(Mapping[str, Any]):
    """A configuration that remembers which names were looked at."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.looked_at: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.looked_at.add(name)
        try:
            return self._config[name]
        except KeyError:
            raise InvalidInput(
                f"The model factory asks for {name!r}, which the configuration "
                f"({', '.join(self._config) or 'empty'}) lacks. Add it to the space or to the task's defaults."
            ) from None

    def get(self, name: str, default: Any = None) -> Any:
        self.looked_at.add(name)
        return self._config.get(name, default)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str):
            self.looked_at.add(name)
        return name in self._config

    def __iter__(self) -> Iterator[str]:
        self.looked_at |= set(self._config)
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


def _arguments(
    make: Callable[..., Any], config: _Seen, what: str
) -> tuple[list[Any], dict[str, Any], set[str]]:
    """How to call a factory with a configuration: as a whole, by names, or with nothing."""
    try:
        parameters = list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return [config], {}, set()
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    used: set[str] = set()
    for index, parameter in enumerate(parameters):
        name, given = parameter.name, parameter.default is not parameter.empty
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            rest = [key for key in config._config if key not in kwargs]
            kwargs.update({key: config._config[key] for key in rest})
            used |= set(rest)
        elif name in config._config:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                args.append(config[name])
            else:
                kwargs[name] = config[name]
            used.add(name)
        elif index == 0 and not given:
            args.append(config)  # the whole configuration, whatever the parameter is called
        elif not given:
            raise InvalidInput(
                f"The {what} factory {_name(make)} wants {name!r}, which the configuration "
                f"({', '.join(config._config) or 'empty'}) lacks. Add it to the space or to the task's defaults."
            )
        else:
            used.add(name)  # it would have been taken
    return args, kwargs, used


def _parameters(make: Any) -> tuple[list[str], bool]:
    """Names a callable takes, and whether it takes any other (``**kwargs``)."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return [], True
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _default(make: Any, name: str, fallback: Any) -> Any:
    parameter = inspect.signature(make).parameters.get(name)
    if parameter is None or parameter.default is parameter.empty or parameter.default is None:
        return fallback
    return parameter.default


def _check_model(model: Any) -> None:
    # A ready-made network would be trained by every trial in turn: the second would start from the first's weights.
    if hasattr(model, "parameters") and hasattr(model, "state_dict") and not isinstance(model, type):
        raise InvalidInput(
            f"model must be a function that makes the network, got the network {type(model).__name__} itself, "
            "which all trials would share. Write model=lambda config: ..."
        )


def _check_step(make: Any, optimizer: Any) -> None:
    """``optimizer``: what is made, or the class."""
    try:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
    except (AttributeError, TypeError, ValueError):  # a function that makes it: seen once it is made
        return
    if closure is not None and closure.default is closure.empty:
        name = _name(optimizer)
        raise InvalidInput(
            f"optimizer={_name(make)}: {name} computes the loss several times a step, by a closure that {name}.step() "
            "must be given, and a task computes it once. Use one that steps without (torch.optim.AdamW, "
            "torch.optim.SGD), or write the loop yourself, as a function train(run)."
        )


def _target(given: Sequence[Any] | None, metrics: Mapping[str, Any]) -> Target | None:
    if given is None:
        return None
    known = ["loss", "train_loss", *metrics]
    text = f'target must be ("metric", value) or ("metric", "<=" or ">=", value), got {given!r}.'
    if not isinstance(given, tuple | list) or len(given) not in (2, 3):
        raise InvalidInput(text)
    name, value = given[0], given[-1]
    if name not in known:
        raise InvalidInput(f"target names the metric {name!r}; the task reports {', '.join(known)}.")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(text)
    if len(given) == 3:
        if given[1] not in ("<=", ">="):
            raise InvalidInput(text)
        return Target(name, float(value), given[1] == ">=")
    return Target(name, float(value), name not in ("loss", "train_loss"))


def _as_data(given: Any) -> Data:
    """What the user gave as data, as a Data."""
    import torch

    if (
        callable(given)
        and not isinstance(given, torch.utils.data.Dataset)
        and not hasattr(given, "__getitem__")
    ):
        given = given()
    if isinstance(given, Data):
        return _as_data(given.train) if callable(given.train) and given.val is None else given
    is_dataset = isinstance(given, torch.utils.data.Dataset) and hasattr(given, "__len__")
    if isinstance(given, torch.utils.data.IterableDataset):
        return Data(given)  # which says, when it is loaded, what is wrong with it
    if isinstance(given, tuple | list) and len(given) == 2:
        if all(isinstance(part, torch.utils.data.Dataset) for part in given):
            return Data(given[0], given[1])
        if all(isinstance(part, tuple | list) and len(part) == 2 for part in given):
            return Data(given[0], given[1])  # ((x, y), (x, y))
        return Data.split(given[0], given[1])
    if is_dataset:
        n = len(given)
        if n < 2:
            raise InvalidInput(f"A dataset of {n} samples can't be split into training and validation.")
        held = max(1, round(0.2 * n))
        from penstock.train._loader import derive

        order = torch.randperm(n, generator=torch.Generator().manual_seed(derive(0, "split"))).tolist()
        subset = torch.utils.data.Subset
        return Data(subset(given, order[held:]), subset(given, order[:held]))
    if isinstance(given, dict) and set(given) <= {"train", "val"} and "train" in given:
        return Data(given["train"], given.get("val"))
    if isinstance(given, torch.Tensor) or hasattr(given, "__array__"):
        return Data.split(given, given)
    from penstock.train._loader import flatten

    if isinstance(given, torch.utils.data.DataLoader):
        flatten(given)
    unsized = " without a length (__len__)" if isinstance(given, torch.utils.data.Dataset) else ""
    raise InvalidInput(
        f"data must be a pk.Data, (inputs, targets), a map-style Dataset or a function that returns one, "
        f"got a {type(given).__name__}{unsized}."
    )


def _name(part: Any) -> str:
    if isinstance(part, dict):
        return "{" + ", ".join(part) + "}"
    return str(getattr(part, "__name__", None) or type(part).__name__)
