"""Which segments run where: plan passes, pure functions from Plan to Plan."""

from penstock.plan._fifo import fifo

__all__ = ["fifo"]
