"""gRPC and a router's HTTP, as parts of the edge: for callers with a credential."""
