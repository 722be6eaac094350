"""The commands: parse, call one service, render, map errors to exit statuses. Heavy imports happen inside commands."""
