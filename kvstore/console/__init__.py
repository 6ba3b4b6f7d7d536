"""The console: a process beside the sidecar that shows people what it says of itself. It can change nothing there."""
