"""What lives in an engine's process: the handle and its verbs, and the socket to a sidecar."""
