"""HTTP for people and for programs that watch the sidecar: liveness, readiness, metrics. On top of the service."""
