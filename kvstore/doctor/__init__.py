"""`kvstore doctor`: what a machine, a data directory, a sidecar and an engine's configuration lack."""
