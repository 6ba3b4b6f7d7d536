"""HTTP for people and for what watches the sidecar: liveness, readiness, metrics. On top of the service."""
