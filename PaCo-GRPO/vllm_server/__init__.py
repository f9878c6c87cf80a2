"""Serving the judge: launch, stop and status of server groups, and an engine for machines without
vLLM.
"""
