"""Shared by all tests: no deadline for hypothesis (the machine may be busy), and its database out of the tree."""

from hypothesis import settings

settings.register_profile("penstock", deadline=None, database=None)
settings.load_profile("penstock")
