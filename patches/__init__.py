"""Mends for faults of pinned upstream packages."""
