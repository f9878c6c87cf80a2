"""Builds the toy weights in ``quickstart/models``. Only maintainers run this, as README.md says."""
