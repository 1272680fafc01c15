"""Runs as TOML files: tiny ones tuned to learn in minutes, and the published stages of GLM-5."""
