"""gRPC beside the local door, and the local door beside a flood of gRPC."""
