"""Building of the toy base models, from seeds alone (`python -m paco_toy.build_models`)."""
