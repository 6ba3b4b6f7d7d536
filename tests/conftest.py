"""What holds for every test: no deadline per example, and a failing example comes with the line that repeats it."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvstore",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.differing_executors],  # a contract's tests are run by every implementation
)
settings.load_profile("kvstore")
