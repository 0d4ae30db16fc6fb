# Run with: make quickstart        (or: python examples/quickstart.py)
"""Tune a small network on scikit-learn's digits with ASHA and TPE on this machine's cores."""

import os

import penstock as pk

QUICK = bool(os.environ.get("PENSTOCK_EXAMPLE_QUICK"))


def train(run):
    """Train one configuration; called in a worker process with the trial's configuration and seed."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    torch.manual_seed(run.seed)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    fit, check = order[:1400], order[1400:]

    width = run.config["width"]
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Dropout(run.config["dropout"]), nn.Linear(width, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=run.config["lr"], momentum=run.config["momentum"])
    if saved := run.load():  # a promoted or retried trial goes on where it was
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    for _ in run.epochs():
        model.train()
        for batch in fit[torch.randperm(len(fit))].split(run.config["batch_size"]):
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(x[check]).argmax(1) == y[check]).float().mean()
        run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        run.report(accuracy=accuracy, loss=loss)


space = pk.Space(
    lr=pk.Float(1e-3, 1, log=True),
    momentum=pk.Float(0.5, 0.99),
    dropout=pk.Float(0, 0.5),
    width=pk.Int(16, 256, log=True),
    batch_size=pk.Choice(16, 32, 64, 128),
)

study = pk.Study(
    train,
    space,
    maximize="accuracy",
    scheduler=pk.ASHA(max_epochs=27, min_epochs=1, eta=3, trials=9 if QUICK else 60, sampler=pk.TPE()),
    store="quickstart.db",
)

if __name__ == "__main__":
    study.run(view="auto")
    print(study)
    print(f"\nEvery event is in {study.store_url}: try  penstock report {study.store_url} --top 5")
