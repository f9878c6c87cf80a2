"""The trainer's own code at a model's real shapes without weights or a GPU: does it run, does it fit, how long does it take?"""
