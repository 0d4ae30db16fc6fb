"""The dashboard: a local web page of a store's studies, live (``penstock dashboard STORE``)."""

from penstock.report.dashboard._serve import HOST, PORT, serve

__all__ = ["HOST", "PORT", "serve"]
