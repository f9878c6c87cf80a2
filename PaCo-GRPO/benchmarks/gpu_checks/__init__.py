"""The parts of check_gpu.py.

How steps run, toy models against the CPU, full-size models, several GPUs, the judge.
"""
