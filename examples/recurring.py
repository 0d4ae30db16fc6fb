# Run with: python examples/recurring.py        (again and again: it remembers in recurring.db)
"""A nightly retraining on scikit-learn's digits that learns which batch size costs the least energy and time."""

from penstock.recurring import RecurringJob


def train(run):
    """Train until the job's target is reached; the batch size, and a learning rate to go with it, are given."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    torch.manual_seed(run.seed)
    torch.set_num_threads(run.threads)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    fit, check = order[:1400], order[1400:]

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=run.config["lr"])
    for _ in run.epochs():
        for batch in fit[torch.randperm(len(fit))].split(run.config["batch_size"]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(x[check]).argmax(1) == y[check]).float().mean()
        run.report(accuracy=accuracy)


job = RecurringJob(
    "digits",
    train,
    batch_sizes=[8, 16, 32, 64, 128, 256],
    default=256,
    target=("accuracy", 0.95),
    max_epochs=60,
    eta=0.5,
    config={"lr": 4e-3},  # for the default batch size; follows it by the square root, for Adam is adaptive
    scale_lr="sqrt",
    store="recurring.db",
)

if __name__ == "__main__":
    for _ in range(6):  # six nights
        print(job.run())
    known = job.status()
    print(
        f"Best so far: batch size {known['best_batch_size']}, after {known['energy_j'] / 3600:.3f} Wh in all."
    )
    job.close()
