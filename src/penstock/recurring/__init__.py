"""recurring."""
