# Run with: python examples/optuna_exchange.py
"""Begin where an Optuna study ended, and hand the result back to Optuna's tools."""

import optuna

import penstock as pk
from penstock.integrations import export_optuna, import_optuna


def train(run):
    """The training that was tuned with Optuna so far."""
    for epoch in run.epochs(3):
        run.report(loss=(run.config["x"] - 0.7) ** 2 + 0.1 / (epoch + 1))


def objective(trial):
    """The same for Optuna."""
    return (trial.suggest_float("x", 0, 1) - 0.7) ** 2 + 0.1 / 3


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    old = optuna.create_study(storage="sqlite:///old.db", study_name="old", load_if_exists=True)
    old.optimize(objective, n_trials=15)

    space = pk.Space(x=pk.Float(0, 1))
    study = pk.Study(
        train,
        space,
        minimize="loss",
        sampler=import_optuna("sqlite:///old.db", space, study_name="old", first=2),  # knows all 15 results
        scheduler=pk.Full(trials=8),
        executor=pk.Local(1),
        store="exchange.db",
    )
    study.run()
    print(study)

    exported = export_optuna(study, "sqlite:///exported.db")
    print(f"\nOptuna's best: {exported.best_params}, {exported.best_value:.4f}")
    print("Look at it with: optuna-dashboard sqlite:///exported.db")
