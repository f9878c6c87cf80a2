"""Serving the judge: launch, stop and status of server groups, and an engine without vLLM.

A launch is read in this order:

    launch.py        what launch.sh does: plan the servers, start them, wait until they answer
    settings.py      the environment variables, and the models that they name
    gpus.py          which model gets which GPUs
    engines.py       vLLM or transformers, with which interpreter and command line
    state.py         the note of what runs, with which status.py shows and ends it

What answers is vLLM, or judge_server.py, which asks ``paco_judge.scorer``; with several models or a
key, gateway.py stands in front. The questions come from ``paco_judge.client``.
"""
