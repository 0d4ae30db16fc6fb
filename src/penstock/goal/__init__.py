"""What a study is after: objectives and their ranking, budgets, Pareto sets, scores."""

from penstock.goal._budget import Budget, Spent
from penstock.goal._objective import METERED, Goal, Objective, metrics_of, ranked
from penstock.goal._pareto import dominates, front, order

__all__ = ["METERED", "Budget", "Goal", "Objective", "Spent", "dominates", "front", "metrics_of", "order", "ranked"]
