"""The training function of the old journals beside this file: their pickles name it."""


def train(run):
    state = run.load() or {"loss": 10.0}
    for _ in run.epochs():
        state["loss"] *= 1 - run.config["x"]
        run.save(state)
        run.report(loss=state["loss"])
