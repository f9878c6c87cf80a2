"""Prompt sets and the order in which a run goes through them."""
