from hypothesis import settings

# Machines that run tests are shared: time limits belong to pytest, not to single examples.
settings.register_profile("judge", deadline=None)
settings.load_profile("judge")
