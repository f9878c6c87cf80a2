"""One port for several models and replicas: what ``gateway_fastapi`` is made of.

``settings`` what is served and within which limits, ``guard`` the API key and the body limit, ``replicas`` which server
gets a request and which ones are out, ``forwarding`` passing a request on and its answer back, ``metrics`` for
Prometheus, ``errors`` in OpenAI's format, ``pages`` what the OpenAPI page says.
"""
