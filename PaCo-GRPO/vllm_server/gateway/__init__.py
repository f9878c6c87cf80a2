"""One port for several models and replicas; the parts of ``gateway_fastapi``.

``replicas``: which server gets a request, and which ones are out. ``forwarding``: a request and its answer on their
way. ``metrics``: for Prometheus.
"""
