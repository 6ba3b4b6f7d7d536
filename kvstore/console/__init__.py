"""The console: a process beside the sidecar that shows people the sidecar's figures."""
