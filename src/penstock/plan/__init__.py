"""Which segments run where: plan passes, pure functions from Plan to Plan."""

from penstock.plan._bubbles import (
    BubbleSchedule,
    Guest,
    Interval,
    Lent,
    Pipeline,
    beside,
    fitted_count,
    lend,
    recall,
    squeeze,
)
from penstock.plan._devices import (
    Allocation,
    Demand,
    DeviceKind,
    Idle,
    Rate,
    Rates,
    allocate,
    cost,
    fair_counts,
    target_kind,
)
from penstock.plan._elastic import dynamic_widths, elastic
from penstock.plan._fifo import fifo
from penstock.plan._fluid import fluid
from penstock.plan._fusion import (
    FusionChoice,
    FusionKey,
    FusionProfile,
    apart,
    choose_count,
    fused_sizes,
    fusion,
    fusion_limit,
    must_agree,
    share_devices,
)
from penstock.plan._pack import lower_bound_s, pack, static_fluid
from penstock.plan._planner import Fluid
from penstock.plan._split import FusedGroup, Regroup, merges, splits
from penstock.plan._transfer import (
    TransferMove,
    TransferStanding,
    transfer_fits,
    transfer_move,
    tuning_end_s,
)
from penstock.plan._waterfill import waterfill_widths

__all__ = [
    "Allocation",
    "BubbleSchedule",
    "Demand",
    "DeviceKind",
    "Fluid",
    "FusedGroup",
    "FusionChoice",
    "FusionKey",
    "FusionProfile",
    "Guest",
    "Idle",
    "Interval",
    "Lent",
    "Pipeline",
    "Rate",
    "Rates",
    "Regroup",
    "TransferMove",
    "TransferStanding",
    "allocate",
    "apart",
    "beside",
    "choose_count",
    "cost",
    "dynamic_widths",
    "elastic",
    "fair_counts",
    "fifo",
    "fitted_count",
    "fluid",
    "fused_sizes",
    "fusion",
    "fusion_limit",
    "lend",
    "lower_bound_s",
    "merges",
    "must_agree",
    "pack",
    "recall",
    "share_devices",
    "splits",
    "squeeze",
    "static_fluid",
    "target_kind",
    "transfer_fits",
    "transfer_move",
    "tuning_end_s",
    "waterfill_widths",
]
