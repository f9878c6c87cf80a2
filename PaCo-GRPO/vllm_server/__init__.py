"""Serving the judge: launch, stop and status of servers, and a server without vLLM.

A launch is read in this order:

    launch.py        what launch.sh does: plan the servers, start them, wait until they answer
    engines.py       the environment variables; vLLM or transformers, on which GPUs, with which
                     command line
    servers.py       the note of what runs; status.sh and stop.sh

What answers is vLLM, or transformers_server.py, which asks ``paco_judge.scorer``; with several
models or a key, gateway.py stands in front. The questions come from ``paco_judge.client``.
"""
