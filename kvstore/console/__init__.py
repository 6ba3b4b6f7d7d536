"""The console: a part of the edge that shows people the figures of a sidecar."""
