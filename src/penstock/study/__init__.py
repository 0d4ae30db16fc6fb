"""Study: the loop that joins the rooms."""

from penstock.study._study import Study

__all__ = ["Study"]
