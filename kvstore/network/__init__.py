"""The network process: gRPC and a router's HTTP beside a sidecar, for callers with a credential."""
