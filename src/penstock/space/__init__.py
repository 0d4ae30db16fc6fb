"""The search space: named domains, conditions between them, sampling and encoding for models."""

from penstock.space._choice import Choice
from penstock.space._condition import Condition, equals, greater, less, one_of
from penstock.space._domain import Domain
from penstock.space._float import Float
from penstock.space._int import Int
from penstock.space._space import Space

__all__ = ["Choice", "Condition", "Domain", "Float", "Int", "Space", "equals", "greater", "less", "one_of"]
