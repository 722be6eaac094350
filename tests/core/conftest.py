"""Hypothesis without deadlines: the machine may be busy, and pytest-timeout bounds every test anyway."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("orch", deadline=None)
settings.load_profile("orch")
