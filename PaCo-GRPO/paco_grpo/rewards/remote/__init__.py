"""A reward in another process: ``service`` runs it, ``client`` asks it, ``wire`` is the format."""
