# Run with: python examples/ray_cluster.py        (on a cluster: see docs/ray.md)
"""Tune a small network on a Ray cluster; without one, on a Ray runtime that is started on this machine for it."""

import os

import penstock as pk


def make_train():
    """The data is loaded once, here: it is put into Ray's object store and travels once to each node."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)

    def train(run):
        import torch
        from torch import nn

        torch.manual_seed(run.seed)
        x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
        fit, check = slice(0, 1400), slice(1400, None)
        device = run.devices[0]
        model = nn.Sequential(
            nn.Linear(64, run.config["width"]), nn.ReLU(), nn.Linear(run.config["width"], 10)
        )
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=run.config["lr"], momentum=0.9)
        if saved := run.load():  # promoted, or its node was lost
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        x, y = x.to(device), y.to(device)
        for _ in run.epochs():
            for start in range(0, 1400, 64):
                batch = slice(start, min(start + 64, 1400))
                loss = nn.functional.cross_entropy(model(x[fit][batch]), y[fit][batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                accuracy = (model(x[check]).argmax(1) == y[check]).float().mean()
            run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            run.report(accuracy=accuracy)

    return train


if __name__ == "__main__":
    quick = bool(os.environ.get("PENSTOCK_EXAMPLE_QUICK"))
    store, name = "penstock.db", "digits-on-ray"
    try:
        study = pk.Study.load(store, name)  # the job was ended before the study was, and is run again
    except pk.errors.PenstockError:  # there is none yet
        study = pk.Study(
            make_train(),
            pk.Space(lr=pk.Float(1e-3, 1.0, log=True), width=pk.Int(16, 256, log=True)),
            maximize="accuracy",
            scheduler=pk.ASHA(max_epochs=4 if quick else 27),
            budget=pk.Budget(trials=4 if quick else 40),
            executor=pk.Ray(),  # RAY_ADDRESS, as ray job submit sets it; else Ray on this machine alone
            store=store,
            name=name,
        )
    study.run(view="lines")
    print(study)
