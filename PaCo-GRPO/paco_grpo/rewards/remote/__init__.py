"""A reward in another process: ``service`` runs it, ``client`` asks it, ``wire`` is their message
format.
"""
