"""gRPC beside the API socket, and the API socket beside a flood of gRPC."""
