"""Which segments run where: plan passes, pure functions from Plan to Plan."""

from penstock.plan._elastic import dynamic_widths, elastic
from penstock.plan._fifo import fifo
from penstock.plan._fluid import fluid
from penstock.plan._pack import lower_bound_s, pack, static_fluid
from penstock.plan._waterfill import waterfill_widths

__all__ = [
    "dynamic_widths",
    "elastic",
    "fifo",
    "fluid",
    "lower_bound_s",
    "pack",
    "static_fluid",
    "waterfill_widths",
]
