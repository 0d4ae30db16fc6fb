"""How much budget each configuration gets: Full, Halving, Hyperband, ASHA, PBT; and stopping rules."""

from penstock.schedule._asha import ASHA
from penstock.schedule._base import Derive, Order, Outcome, Propose, Rules, Scheduler
from penstock.schedule._divergence import Divergence
from penstock.schedule._full import Full
from penstock.schedule._halving import Halving
from penstock.schedule._hyperband import Hyperband
from penstock.schedule._pbt import PBT
from penstock.schedule._sm2 import SM2
from penstock.schedule._stopping import MedianStop, Plateau, StopRule

__all__ = [
    "ASHA",
    "PBT",
    "SM2",
    "Derive",
    "Divergence",
    "Full",
    "Halving",
    "Hyperband",
    "MedianStop",
    "Order",
    "Outcome",
    "Plateau",
    "Propose",
    "Rules",
    "Scheduler",
    "StopRule",
]
