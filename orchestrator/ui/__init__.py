"""Rendering: pure functions of a view. No service, no network, no clock in here."""
