"""Rewards. ``registry`` finds them by name or import path.

``judge`` holds those that ask the judge, ``clip`` pickscore, clipscore and subfig_clip*, and
``queue`` scores images in the background. ``pickscore_scores`` and ``subfig_clipT``, which have
published names, only download weights.
"""
