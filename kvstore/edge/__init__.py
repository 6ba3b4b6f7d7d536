"""The edge: a process that serves people, probes, scrapers and gRPC callers, as a client of the sidecar's sockets."""
