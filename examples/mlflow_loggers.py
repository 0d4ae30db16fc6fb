# Run with: python examples/mlflow_loggers.py        (needs: pip install "penstock[mlflow,tensorboard,prometheus]")
"""One study in MLflow (live), in TensorBoard (afterwards) and as Prometheus sees it."""

import penstock as pk
from penstock.integrations import MLflowLogger, TensorBoardLogger, metrics_text


def train(run):
    """A stand-in for a training whose loss falls."""
    for epoch in run.epochs(5):
        run.report(loss=abs(run.config["x"] - 0.3) + 1 / (epoch + 1))


study = pk.Study(
    train,
    pk.Space(x=pk.Float(0, 1)),
    minimize="loss",
    scheduler=pk.Full(trials=6),
    executor=pk.Local(1),
    store="loggers.db",
)

if __name__ == "__main__":
    study.run(view=MLflowLogger("penstock-example", tracking_uri="sqlite:///mlflow.db"))
    TensorBoardLogger("runs").export("loggers.db")
    print(study)
    print("\nIn MLflow: mlflow ui --backend-store-uri sqlite:///mlflow.db")
    print("In TensorBoard: tensorboard --logdir runs")
    print("For Prometheus:")
    print("\n".join(line for line in metrics_text("loggers.db").splitlines() if line[:1] != "#"))
