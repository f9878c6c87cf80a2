"""Builds the toy weights in ``quickstart/models``; only maintainers run this. See README.md for the commands."""
