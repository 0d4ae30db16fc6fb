# Run with: python examples/sklearn_search.py        (needs: pip install "penstock[sklearn]")
"""A study in place of GridSearchCV: folds are its epochs, so most configurations are given up after the first one."""

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

import penstock as pk
from penstock.integrations import PenstockSearchCV

X, y = load_digits(return_X_y=True)
X_fit, X_check, y_fit, y_check = train_test_split(X[:600], y[:600], random_state=0)

search = PenstockSearchCV(
    make_pipeline(StandardScaler(), SVC()),
    {
        "svc__C": pk.Float(1e-2, 1e3, log=True),
        "svc__kernel": pk.Choice("rbf", "linear"),
        "svc__gamma": pk.Float(1e-5, 1, log=True, when=pk.equals("svc__kernel", "rbf")),
    },
    scheduler=pk.Halving(max_epochs=4, min_epochs=1, eta=2, trials=16),
    cv=4,
    random_state=0,
)

if __name__ == "__main__":
    search.fit(X_fit, y_fit)
    folds = search.cv_results_["n_folds"]
    print(f"best: {search.best_params_}, cross-validated accuracy {search.best_score_:.3f}")
    print(f"accuracy on what it has not seen: {search.score(X_check, y_check):.3f}")
    print(f"{folds.sum()} folds of {4 * len(folds)} were evaluated; energy: {search.energy_}")
