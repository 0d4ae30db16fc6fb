# Run with: python examples/energy.py
"""Tune within an energy budget, let each GPU find its best power limit, and say what it cost."""

import penstock as pk
from penstock.core import VirtualClock
from penstock.energy import V100_LOADS, SimulatedGpu


def train(run):
    """Train one configuration, telling of every iteration, so that power limits can be tried meanwhile."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    torch.manual_seed(run.seed)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32, device=run.device) / 16
    y = torch.tensor(labels, device=run.device)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.config["lr"], momentum=0.9)
    for _ in run.epochs():
        for batch in torch.randperm(1400).split(run.config["batch_size"]):
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.iteration(len(batch))
        with torch.no_grad():
            accuracy = (model(x[1400:]).argmax(1) == y[1400:]).float().mean()
        run.report(accuracy=accuracy)


study = pk.Study(
    train,
    pk.Space(lr=pk.Float(1e-3, 1, log=True), batch_size=pk.Choice(32, 128)),
    maximize="accuracy",
    scheduler=pk.ASHA(max_epochs=9, trials=9),
    budget=pk.Budget(energy_wh=2),
    region="DE",
    price_per_kwh=0.30,
    power_limits=pk.EtaCost(0.5),  # on a machine without GPUs it says so once, and goes on
    store="energy.db",
)


def simulated_v100():
    """The same optimiser around a training of ResNet-50 on a simulated V100: no GPU needed to see what it does."""
    clock = VirtualClock()
    gpu = SimulatedGpu(clock)
    gpu.run(V100_LOADS["resnet50", 256])
    for rule in (pk.LeastTime(), pk.EtaCost(0.5), pk.LeastEnergyWithin(0.1), pk.LeastEnergy()):
        with pk.PowerLimiter([gpu], rule=rule, now=clock.now_s) as limiter:
            limiter.epoch_begin()
            while limiter.profiling:
                clock.advance_to(clock.now_s() + 0.5 * gpu.slowdown())  # an iteration
                limiter.iteration(256)
            limiter.epoch_end()
            print(f"{rule}: {limiter.report}")


if __name__ == "__main__":
    study.run(view="auto")
    print(study)
    print("\nResNet-50 on a simulated V100:")
    simulated_v100()
